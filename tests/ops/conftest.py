"""Fixtures for tests of ops."""

from __future__ import annotations

from pathlib import Path

import pytest
from building import Workshop, set_up

from fresh_process import FreshProcesses


@pytest.fixture
def workshop(tmp_path: Path, fresh: FreshProcesses) -> Workshop:
    """A place to build the test packages' ops in."""
    return set_up(tmp_path, fresh)
