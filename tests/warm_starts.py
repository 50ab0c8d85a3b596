"""Fixtures with which the Pythons that tests start have torch imported already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from warm_python import WarmPython, WarmServer

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

MODULES = ("torch", "torch._dynamo", "psutil", "rich.progress", "rich.table", "pytest")
"""What the server imports; torch._dynamo comes with the first optimizer.

No plugin of pytest, which pytest imports in its own way.
"""
MODELS = (
    "transformers", "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.gemma3.modeling_gemma3", "transformers.models.gpt_oss.modeling_gpt_oss",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.conversion_mapping:get_checkpoint_conversion_mapping('llama')",
    "torch.fx.experimental.symbolic_shapes:uninteresting_files()",
    *filter(find_spec, ("peft", "fastapi", "uvicorn", "openai", "libcst")),
)  # fmt: skip
"""What a second server imports too, for tests of models, and for the collection of all tests.

The first one does not, since transformers asks torch for devices when it is imported, and a stand-in brings
them later. Of the two expressions, the first makes transformers compile the 900 patterns with which it
converts names of weights, and the second is what torch imports for the first symbolic size: each takes half a
second of every process that loads a model, or captures its program.
"""

_SERVER = pytest.StashKey[WarmServer]()
_STARTS = pytest.StashKey[ExitStack]()
_ADDRESSES = "warm_pythons"
_THIS_RUN: list[pytest.Config] = []


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Starts the processes of a run from a server, which makes the imports once for all of them."""
    if _SERVER not in config.stash:
        server = WarmServer(MODULES, MODELS)
        config.stash[_SERVER] = server
        config.stash[_STARTS] = ExitStack()
        address = server.address_of_second if _has_tests_of_models(config) else server.address
        config.stash[_STARTS].enter_context(WarmPython(address).in_place())


def _has_tests_of_models(config: pytest.Config) -> bool:
    folder = config.rootpath / "tests" / "llm"
    chosen = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    return folder.is_dir() and any(
        path.is_relative_to(folder) or folder.is_relative_to(path) for path in chosen
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Gives the processes of a run that server."""
    server = node.config.stash[_SERVER]
    node.workerinput[_ADDRESSES] = (server.address, server.address_of_second)


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


def warm_python_of_this_run(*, models: bool = False) -> WarmPython:
    """Starts Pythons that have torch imported already, and transformers if they are for models."""
    (config,) = _THIS_RUN
    given = getattr(config, "workerinput", {})
    if _ADDRESSES not in given and _SERVER not in config.stash:
        config.stash[_SERVER] = WarmServer(MODULES, MODELS)
    if _ADDRESSES in given:
        addresses = given[_ADDRESSES]
    else:
        addresses = (config.stash[_SERVER].address, config.stash[_SERVER].address_of_second)
    return WarmPython(addresses[models])


@pytest.fixture(scope="session")
def warm_python() -> WarmPython:
    """Starts Pythons that have torch imported already."""
    return warm_python_of_this_run()


@pytest.fixture(scope="session")
def warm_models() -> WarmPython:
    """Starts Pythons that have torch and transformers imported already."""
    return warm_python_of_this_run(models=True)


@pytest.fixture
def warm_starts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every Python that the test starts has torch imported already; in slow tests each starts as it is."""
    yield from _starts(request, "warm_python")


@pytest.fixture
def warm_model_starts(request: pytest.FixtureRequest) -> Iterator[None]:
    """As :func:`warm_starts`, with transformers too."""
    yield from _starts(request, "warm_models")


def _starts(request: pytest.FixtureRequest, pythons: str) -> Iterator[None]:
    if request.node.get_closest_marker("slow"):
        yield
        return
    with request.getfixturevalue(pythons).in_place():
        yield
