"""Fixtures for tests of every room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fake_vendors import machine as machine
from fresh_process import FreshProcesses
from machine_trees import recorded as recorded


@pytest.fixture(scope="session")
def fresh() -> Iterator[FreshProcesses]:
    """Runs code in fresh processes."""
    processes = FreshProcesses()
    yield processes
    processes.close()
