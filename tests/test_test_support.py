"""What the tests themselves rest on: fresh processes, signals, and how skipped tests are reported."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from fresh_process import FreshProcesses, plain_environment
from session_signals import take_signals


def test_entry_points_without_a_selection_are_those_of_all_groups(fresh: FreshProcesses) -> None:
    told = fresh.check("""
from importlib.metadata import entry_points
points = list(entry_points())
tell(groups=sorted({point.group for point in points}))
""").told
    assert {"console_scripts", "pytest11"} <= set(told["groups"])
    assert "acclimate.backends" not in told["groups"]


def test_a_run_that_ignores_ctrl_c_starts_programs_that_do_not() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        take_signals()
        program = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert child.stdout == "False\n"
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_reason_to_skip_is_told_once_with_the_number_of_tests(tmp_path: Path) -> None:
    (tmp_path / "test_skipped.py").write_text("""
import pytest
@pytest.mark.parametrize("number", range(5))
def test_of_five(number): pytest.skip("not installed: slurmctld")
@pytest.mark.skipif(True, reason="no nvcc on PATH")
def test_of_one(): pass
""")
    environment = {name: value for name, value in plain_environment().items() if "PYTEST" not in name}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "skip_summary", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("not installed: slurmctld") == 1
    assert "\n5 tests: not installed: slurmctld\n1 test: no nvcc on PATH\n" in run.stdout
