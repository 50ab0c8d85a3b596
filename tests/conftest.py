"""Fixtures for tests of every room, and what a whole run needs."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from fake_vendors import machine as machine
from fresh_process import FreshProcesses
from machine_trees import recorded as recorded
from skip_summary import pytest_terminal_summary as pytest_terminal_summary

IGNORED_IN_THE_BACKGROUND = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
"""What `make test &` in a script, or `nohup`, has tests ignore, and with them each process they start."""


def pytest_configure() -> None:
    """Takes signals as in a terminal: tests send them to programs, which leave an ignored one ignored."""
    for number in IGNORED_IN_THE_BACKGROUND:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(scope="session")
def fresh() -> Iterator[FreshProcesses]:
    """Runs code in fresh processes."""
    processes = FreshProcesses()
    yield processes
    processes.close()
