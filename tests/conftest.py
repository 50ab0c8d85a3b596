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

LONGEST_FILES = (
    "conformance/test_conformance.py",
    "examples/test_train_gpt.py",
    "conformance/test_mutants.py",
    "ops/test_optimizer_ops.py",
    "docs/test_guide.py",
    "inference/test_model_files.py",
    "inference/test_command.py",
    "backends/test_stand_ins.py",
    "ops/test_builder.py",
    "launch/test_run_command.py",
)


def pytest_configure() -> None:
    """Takes signals as in a terminal: tests send them to programs, which leave an ignored one ignored."""
    for number in IGNORED_IN_THE_BACKGROUND:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starts with the longest files, so that no process is left alone with one of them at the end."""
    place = {name: number for number, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: place.get("/".join(item.path.parts[-2:]), len(place)))


@pytest.fixture(scope="session")
def fresh() -> Iterator[FreshProcesses]:
    """Runs code in fresh processes."""
    processes = FreshProcesses()
    yield processes
    processes.close()
