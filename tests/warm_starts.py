"""Fixtures with which the Pythons that tests start have torch imported already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from warm_python import WarmPython, WarmServer

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

MODULES = ("torch", "torch._dynamo")
"""What the server imports; the latter comes with the first optimizer."""

_SERVER = pytest.StashKey[WarmServer]()
_ADDRESS = "warm_python"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Gives the processes of a run one server: each of its own would import torch once more."""
    stash = node.config.stash
    if _SERVER not in stash:
        stash[_SERVER] = WarmServer(*MODULES)
    node.workerinput[_ADDRESS] = stash[_SERVER].address


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the server."""
    if _SERVER in config.stash:
        config.stash[_SERVER].close()


@pytest.fixture(scope="session")
def warm_python(request: pytest.FixtureRequest) -> WarmPython:
    """Starts Pythons that have torch imported already."""
    stash = request.config.stash
    given = getattr(request.config, "workerinput", {})
    if _ADDRESS not in given and _SERVER not in stash:
        stash[_SERVER] = WarmServer(*MODULES)
    return WarmPython(given.get(_ADDRESS) or stash[_SERVER].address)


@pytest.fixture
def warm_starts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every Python that the test starts has torch imported already; in slow tests each starts as it is."""
    if request.node.get_closest_marker("slow"):
        yield
        return
    with request.getfixturevalue("warm_python").in_place():
        yield
