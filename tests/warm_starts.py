"""Fixtures with which the Pythons that tests start have torch imported already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from warm_python import WarmPython, WarmServer

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

MODULES = ("torch", "torch._dynamo", "psutil", "rich.progress", "rich.table", "pytest")
"""What the server imports; torch._dynamo comes with the first optimizer.

Not transformers, whose import asks torch for devices, which a stand-in brings later; nor a plugin of pytest,
which pytest imports in its own way.
"""

_SERVER = pytest.StashKey[WarmServer]()
_STARTS = pytest.StashKey[ExitStack]()
_ADDRESS = "warm_python"
_THIS_RUN: list[pytest.Config] = []


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Starts the processes of a run from one server, which imports torch once for all of them."""
    if _SERVER not in config.stash:
        config.stash[_SERVER] = WarmServer(*MODULES)
        config.stash[_STARTS] = ExitStack()
        config.stash[_STARTS].enter_context(WarmPython(config.stash[_SERVER].address).in_place())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Gives the processes of a run that server."""
    node.workerinput[_ADDRESS] = node.config.stash[_SERVER].address


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the server."""
    if _STARTS in config.stash:
        config.stash[_STARTS].close()
        del config.stash[_STARTS]
    if _SERVER in config.stash:
        config.stash[_SERVER].close()
        del config.stash[_SERVER]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remembers the run's settings, for what has no fixture."""
    _THIS_RUN[:] = [session.config]


def warm_python_of_this_run() -> WarmPython:
    """Starts Pythons that have torch imported already."""
    (config,) = _THIS_RUN
    given = getattr(config, "workerinput", {})
    if _ADDRESS not in given and _SERVER not in config.stash:
        config.stash[_SERVER] = WarmServer(*MODULES)
    return WarmPython(given.get(_ADDRESS) or config.stash[_SERVER].address)


@pytest.fixture(scope="session")
def warm_python() -> WarmPython:
    """Starts Pythons that have torch imported already."""
    return warm_python_of_this_run()


@pytest.fixture
def warm_starts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every Python that the test starts has torch imported already; in slow tests each starts as it is."""
    if request.node.get_closest_marker("slow"):
        yield
        return
    with request.getfixturevalue("warm_python").in_place():
        yield
