"""Fixtures for tests of every room, and what a whole run needs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from fake_vendors import machine as machine
from fresh_process import FreshProcesses
from machine_trees import recorded as recorded
from session_signals import take_signals
from skip_summary import pytest_terminal_summary as pytest_terminal_summary
from warm_starts import warm_python as warm_python
from warm_starts import warm_starts as warm_starts

LONGEST_FILES = (
    "conformance/test_conformance.py",
    "comm/test_collectives.py",
    "tests/test_sim_folders.py",
    "launch/test_run_command.py",
    "optimizers/test_optimizer_ops.py",
    "tests/test_sim_operators.py",
    "docs/test_guide.py",
    "examples/test_train_gpt.py",
    "comm/test_comm_failures.py",
    "elastic/test_elastic.py",
    "engines/test_mpi.py",
    "engines/test_ssh.py",
    "optimizers/test_optimizers.py",
    "accelerator/test_other_devices.py",
    "accelerator/test_graphs.py",
    "tests/test_cli_failures.py",
    "selection/test_detection.py",
    "selection/test_broken_records.py",
    "conformance/test_mutants.py",
)


# How long an example takes says nothing where other work shares the processors.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_configure() -> None:
    take_signals()
    # Else each of the many processes that tests start would compile the sources anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


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
