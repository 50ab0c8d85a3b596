"""The exit codes of the commands, which docs/commands.md explains to users.

A rank that cannot be started ends with 126 or 127, as in a shell (``launch/supervise/guard_process.py``).
"""

from __future__ import annotations

NEGATIVE_RESULT = 1
"""The command has done its work, and its answer is no: a check failed, an op could not be built."""
READER_LEFT = 1
"""The reader of the output has exited early."""
USER_ERROR = 2
"""An error that the user can mend: in the command line, a file or this machine. argparse has the same."""
OWN_ERROR = 70
"""A bug in acclimate; ``EX_SOFTWARE`` in ``sysexits.h``."""
INTERRUPTED = 130
"""Ctrl-C: what a shell reports after SIGINT."""
TEXT_READER_LEFT = 141
"""The reader of generated text has exited early: what a shell reports after SIGPIPE, which Windows lacks."""


def shell_code(code: int) -> int:
    """Returns a shell's exit code: the process's own, or 128 + the signal's number.

    Args:
        code: an exit code, or minus the number of the signal that killed the process, as in
            :mod:`subprocess`.
    """
    return 128 - code if code < 0 else code
