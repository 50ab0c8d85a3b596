"""Fixtures for tests of ops."""

from __future__ import annotations

from pathlib import Path

import pytest
from building import Workshop, set_up

from fresh_process import FreshProcesses


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the compiler has made for tests of this run."""
    return tmp_path_factory.mktemp("objects")


@pytest.fixture
def workshop(tmp_path: Path, objects: Path, fresh: FreshProcesses) -> Workshop:
    """A place to build the test packages' ops in."""
    return set_up(tmp_path, objects, fresh)
