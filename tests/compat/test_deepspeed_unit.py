"""The program that counts DeepSpeed's own unit tests, with a checkout that has two tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("deepspeed_unit.py")
TESTS = """
import time

def test_long():
    with open({ran!r}, "a") as file:
        file.write("long\\n")
    time.sleep(1.2)

def test_next():
    with open({ran!r}, "a") as file:
        file.write("next\\n")
    assert {works}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    unit = tmp_path / "tests" / "unit"
    unit.mkdir(parents=True)
    (unit / "test_two.py").write_text(TESTS.format(ran=str(tmp_path / "ran"), works=True))
    (tmp_path / "tests" / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def count(checkout: Path, limit_s: int) -> subprocess.CompletedProcess[str]:
    options = ["--on", "own", "--limit", str(limit_s), "--results", str(checkout / "results.json")]
    return subprocess.run(
        [sys.executable, str(PROGRAM), str(checkout), "unit/test_two.py", *options],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(checkout / "ops")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_part_that_was_stopped_is_not_called_done_and_the_next_call_runs_the_rest(checkout: Path) -> None:
    first = count(checkout, 1)
    assert first.returncode == 1, first.stderr
    assert "1 passed / 0 failed / 0 skipped / 1 not run" in first.stdout
    assert "1 did not run." in first.stdout
    second = count(checkout, 60)
    assert second.returncode == 0, second.stderr
    assert "2 passed / 0 failed / 0 skipped\n" in second.stdout
    assert (checkout / "ran").read_text().splitlines() == ["long", "next"]


def test_a_failed_test_is_told_with_its_last_line_and_a_lock_of_a_killed_build_goes(checkout: Path) -> None:
    file = checkout / "tests" / "unit" / "test_two.py"
    file.write_text(TESTS.format(ran=str(checkout / "ran"), works="1 == 2").replace("1.2", "0"))
    lock = checkout / "ops" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert "1 passed / 1 failed / 0 skipped" in count(checkout, 60).stdout
    assert not lock.exists()
    results = json.loads((checkout / "results.json").read_text())["unit/test_two.py"]["own"]
    assert results["unit/test_two.py::test_next"] == ["failed", "E assert 1 == 2"]
