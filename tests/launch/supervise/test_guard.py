"""Whoever is killed or stopped, nothing of a job is left; each is an `acclimate run` with real processes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from launching import (
    FAMILY,
    all_ready,
    assert_nothing_is_left,
    command,
    launched,
    parent_of,
    pid_in,
    ranks_code,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers and /proc")


def test_children_and_daemons_of_a_rank_end_with_it(tmp_path: Path) -> None:
    with launched(command(2, ranks_code(tmp_path, FAMILY + "ready()"), "--grace", "0.3")) as job:
        job.read()
        assert job.wait() == 0
        assert job.living() == {}


def test_nothing_is_left_of_any_rank_when_one_fails(tmp_path: Path) -> None:
    text = FAMILY + "ready()\nwhile rank == 1: time.sleep(1)\nsys.exit(4)"
    with launched(command(2, ranks_code(tmp_path, text), "--grace", "0.3")) as job:
        job.read()
        assert job.wait() == 4
        assert job.living() == {}


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    text = FAMILY + "ready()\ntime.sleep(600)"
    with launched(command(2, ranks_code(tmp_path, text), "--grace", "0.3")) as job:
        all_ready(tmp_path, 2)
        job.signal(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        assert_nothing_is_left(job)


def test_nothing_is_left_when_a_guard_is_killed_and_the_job_ends(tmp_path: Path) -> None:
    text = FAMILY + "ready()\ntime.sleep(600)"
    with launched(command(2, ranks_code(tmp_path, text), "--grace", "0.3")) as job:
        all_ready(tmp_path, 2)
        guard = parent_of(pid_in(tmp_path / "ready1"))
        assert Path(f"/proc/{guard}/comm").read_text() == "acclimate-guard\n"
        os.kill(guard, signal.SIGKILL)
        _, stderr = job.read()
        assert job.wait() == 137
        assert job.living() == {}
    assert "rank 1 (" in stderr
    assert f"Its guard process (pid {guard}) was killed by signal 9" in stderr


def test_a_rank_dies_with_launcher_and_guard_killed_at_once(tmp_path: Path) -> None:
    with launched(command(1, ranks_code(tmp_path, "ready()\ntime.sleep(600)"))) as job:
        rank = pid_in(tmp_path / "ready0")
        os.kill(parent_of(rank), signal.SIGKILL)
        job.signal(signal.SIGKILL)
        assert_nothing_is_left(job)


def test_a_stopped_rank_ends_too(tmp_path: Path) -> None:
    text = """
ready()
while len(list(folder.glob("ready*"))) < 2: time.sleep(0.01)
if rank == 1:
    time.sleep(0.2)
    sys.exit(3)
os.kill(os.getpid(), signal.SIGSTOP)
"""
    with launched(command(2, ranks_code(tmp_path, text), "--grace", "60")) as job:
        job.read()
        assert job.wait() == 3
