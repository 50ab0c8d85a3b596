"""Fixtures for tests of the launcher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hosts as machines
import pytest
from engine_jobs import Jobs
from hosts import Hosts


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where hosts cannot be made."""
    reason = machines.why_not()
    if reason is not None:
        pytest.skip(f"no hosts can be made of network namespaces: {reason}")


@pytest.fixture
def hosts(namespaces: None, tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts, alpha and beta, and the machine named head that can log in to them."""
    folder = tmp_path / "network"
    folder.mkdir()
    made = Hosts(folder)
    yield made
    made.close()


@pytest.fixture
def jobs(hosts: Hosts, tmp_path: Path) -> Jobs:
    """Starts jobs on the hosts from head."""
    return Jobs(hosts, tmp_path)
