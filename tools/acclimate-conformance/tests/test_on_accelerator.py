"""``pytest --on-accelerator NAME`` runs a project's own tests on that accelerator."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fresh_process import plain_environment

pytestmark = pytest.mark.usefixtures("warm_starts")


OWN_TEST = """
import os
import sys
import conftest
def test_own():
    assert conftest.CHOSEN == ("cpu", "ACCLIMATE_ACCELERATOR=cpu", "cpu")
    assert os.environ["DIFFUSERS_TEST_DEVICE"] == "kept"
"""
CONFTEST = """
import os
from acclimate.selection import chosen_by, get_accelerator
CHOSEN = (get_accelerator().name, chosen_by(), os.environ["TRANSFORMERS_TEST_DEVICE"])
def pytest_addoption(parser):
    parser.addoption("--accelerator")
    parser.addoption("--device")
"""


def run_pytest(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**plain_environment(), **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_the_accelerator_is_there_before_a_conftest_is_read_and_the_header_tells_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_own.py").write_text(OWN_TEST)
    run = run_pytest(tmp_path, "--on-accelerator", "cpu", DIFFUSERS_TEST_DEVICE="kept")
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(
        r"^accelerator: cpu, \d+ devices? of type cpu, TRANSFORMERS_TEST_DEVICE=cpu", run.stdout, re.M
    )


def test_the_variable_alone_names_it_and_a_name_that_is_none_ends_pytest_with_the_reason(
    tmp_path: Path,
) -> None:
    run = run_pytest(tmp_path, ACCLIMATE_ACCELERATOR="cqu")
    assert run.returncode == 4
    assert 'did you mean "cpu"' in run.stderr
    assert "Traceback" not in run.stdout + run.stderr
