"""Signals of a run that was started in the background."""

from __future__ import annotations

import signal

IGNORED_IN_THE_BACKGROUND = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
"""What `make test &` in a script, or `nohup`, has tests ignore, and with them each process they start."""


def take_signals() -> None:
    """Takes signals as in a terminal: tests send them to programs, which leave an ignored one ignored."""
    for number in IGNORED_IN_THE_BACKGROUND:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
