"""Fixtures for tests of every room, and what a whole run needs."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

# Tests run as on a machine without a GPU, which `acclimate conformance` checks. Before any import of torch,
# and for all processes that tests start.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from control_group import own_group as own_group
from fake_vendors import machine as machine
from fresh_process import FreshProcesses
from machine_trees import recorded as recorded
from run_in_parallel import pytest_collection_modifyitems as pytest_collection_modifyitems
from run_in_parallel import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler
from session_signals import take_signals
from shared_bytecode import rewrite_share
from skip_summary import pytest_terminal_summary as pytest_terminal_summary
from warm_python import WarmPython, start_real_pythons
from warm_starts import pytest_configure_node as pytest_configure_node
from warm_starts import pytest_sessionstart as pytest_sessionstart
from warm_starts import pytest_unconfigure as pytest_unconfigure
from warm_starts import pytest_xdist_setupnodes as pytest_xdist_setupnodes
from warm_starts import warm_model_starts as warm_model_starts
from warm_starts import warm_models as warm_models
from warm_starts import warm_python as warm_python
from warm_starts import warm_starts as warm_starts


def pytest_configure(config: pytest.Config) -> None:
    take_signals()
    if hasattr(config, "workerinput"):
        start_real_pythons()
        gc.disable()  # until all tests are collected, which takes a quarter longer with it
        rewrite_share(config)
    # How long an example takes says nothing where other work shares the processors. `make test` tries the
    # same examples each time, so that a failure comes from a change; other runs try new ones, and more.
    settings.register_profile(
        "shared",
        max_examples=25 if config.option.markexpr == "not slow" else 100,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=config.option.markexpr == "not slow",
    )
    settings.load_profile("shared")
    if config.option.markexpr == "not slow":
        # Else examples depend on which sources a process has imported, and each process of a run reads all
        # of them: 2 s of processor time in a fresh clone. Hypothesis has no setting for it.
        providers._get_local_constants = lambda: providers._local_constants
    # Else this process and each of the many that tests start would compile the sources anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def fresh(warm_python: WarmPython) -> Iterator[FreshProcesses]:
    """Runs code in fresh processes."""
    processes = FreshProcesses(warm_python.in_place)
    yield processes
    processes.close()
