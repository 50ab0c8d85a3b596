"""Runs tests and programs in a process of their own that uses sim.

torch's device type from outside gets its name once per process and stands before CUDA in
``torch.accelerator``; so a process either has sim or has not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run_python(
    *arguments: str, profile: str = "", accelerator: str | None = "sim", timeout_s: float = 850
) -> subprocess.CompletedProcess[str]:
    """Runs Python with the arguments; ``accelerator`` as None leaves the choice to detection."""
    chosen = ("ACCLIMATE_ACCELERATOR", "DS_ACCELERATOR", "ACCLIMATE_SIM", "ACCLIMATE_SIM_VISIBLE_DEVICES")
    env = {name: value for name, value in os.environ.items() if name not in chosen}
    if accelerator is not None:
        env["ACCLIMATE_ACCELERATOR"] = accelerator
    if profile:
        env["ACCLIMATE_SIM"] = profile
    return subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def run_folder(names: str, profile: str = "", marks: str = "not slow") -> None:
    """Runs those tests of folders or files on sim that ``pytest -m`` chooses; fails with their report.

    Args:
        names: of the folders or files, with spaces between; one process runs them all.
        profile: what ``ACCLIMATE_SIM`` says.
        marks: which of the tests.
    """
    paths = [str(TESTS / name) for name in names.split()]
    result = run_python("-m", "pytest", "-q", "-m", marks, *paths, profile=profile)
    assert result.returncode == 0, result.stdout + result.stderr


def run_program(source: str, profile: str = "", accelerator: str | None = "sim") -> str:
    """What a program prints; fails with its traceback where it raises."""
    result = run_python("-c", source, profile=profile, accelerator=accelerator)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()
