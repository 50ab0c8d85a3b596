"""``python -m acclimate`` and the program ``acclimate``."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Runs this process's command line; returns the exit code."""
    # Importing the command line takes a while; until it handles Ctrl-C, the default action ends the process
    # without a traceback.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from acclimate.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
