"""The folders below need a process that uses sim: test_sim_folders.py starts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # sim_process, also for the folders below
sys.path.append(str(Path(__file__).parents[3] / "tests"))

from warm_python import WarmPython, WarmServer
from warm_starts import warm_starts as warm_starts

ON_SIM = os.environ.get("ACCLIMATE_ACCELERATOR") == "sim"
"""Whether this is the process that test_sim_folders.py starts."""

if not ON_SIM:
    collect_ignore = ["on_sim", "with_limits", "with_sync_check"]


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Starts Pythons that have torch imported already, and not torch._dynamo: sim acts on its import."""
    server = WarmServer("torch")
    yield WarmPython(server.address)
    server.close()


@pytest.fixture(autouse=True)
def quick_starts(request: pytest.FixtureRequest) -> None:
    """Most tests here start a Python for a few lines."""
    if not ON_SIM:
        request.getfixturevalue("warm_starts")
