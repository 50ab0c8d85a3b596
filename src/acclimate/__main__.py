"""``python -m acclimate`` and the program ``acclimate``."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Runs the command line of this process; returns the exit code."""
    # Importing the command line takes a while. Until it handles Ctrl-C, the kernel ends the process silently.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from acclimate.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
