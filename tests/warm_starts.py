"""Fixtures with which the Pythons that tests start have torch imported already."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from warm_python import WarmPython


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Starts Pythons that have torch imported already."""
    python = WarmPython("torch", "torch._dynamo")  # the latter comes with the first optimizer
    yield python
    python.close()


@pytest.fixture
def warm_starts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every Python that the test starts has torch imported already; in slow tests each starts as it is."""
    if request.node.get_closest_marker("slow"):
        yield
        return
    with request.getfixturevalue("warm_python").in_place():
        yield
