"""Makes this folder's modules importable in the folders below, and the repository's own test support."""

from __future__ import annotations

import sys
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "tests"))  # browser

ABSENT = [name for name in ("torch", "acclimate") if find_spec(name) is None]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Skips a test that runs ported code where what that code imports is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name in ABSENT:
            pytest.skip(f"the ported code needs {error.name}")
        raise
