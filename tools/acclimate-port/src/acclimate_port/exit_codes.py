"""The exit codes of ``acclimate-port``, which are those of acclimate's commands (docs/commands.md)."""

from __future__ import annotations

NEGATIVE_RESULT = 1
"""``--check`` has found hardware-specific code, or the reader of the output has exited early."""
USER_ERROR = 2
"""An error that the user can mend, in the command line or a file. argparse has the same."""
INTERRUPTED = 130
"""Ctrl-C: what a shell reports after SIGINT."""
