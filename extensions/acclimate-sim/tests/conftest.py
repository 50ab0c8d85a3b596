"""The folders below need a process that uses sim: test_sim_folders.py starts it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # sim_process, also for the folders below
sys.path.append(str(Path(__file__).parents[3] / "tests"))

from warm_starts import pytest_sessionstart as pytest_sessionstart
from warm_starts import pytest_unconfigure as pytest_unconfigure
from warm_starts import warm_python as warm_python
from warm_starts import warm_starts as warm_starts

ON_SIM = os.environ.get("ACCLIMATE_ACCELERATOR") == "sim"
"""Whether this is the process that test_sim_folders.py starts."""

if not ON_SIM:
    collect_ignore = ["on_sim", "with_limits", "with_sync_check"]


@pytest.fixture(autouse=True)
def quick_starts(request: pytest.FixtureRequest) -> None:
    """Most tests here start a Python for a few lines."""
    if not ON_SIM:
        request.getfixturevalue("warm_starts")
