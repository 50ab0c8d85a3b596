"""Which signal or code wins when a job is both ended and failing."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from launching import all_ready, command, launched, names_in, ranks_code, wait_until

from acclimate.host.exit_codes import shell_code
from acclimate.launch.plan.outcome import Outcome, RankFailure
from acclimate.launch.supervise.supervisor import code_of_ended_job

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers and /proc")

KILLED, TERMINATED = -signal.SIGKILL, -signal.SIGTERM


@pytest.mark.parametrize(
    ("codes", "ended_by", "forced", "code"),
    [
        ([0, 0], None, False, 0),
        ([0, 0], signal.SIGTERM, False, 0),  # all dealt with it and ended well
        ([0, 0], signal.SIGTERM, True, TERMINATED),
        ([TERMINATED, TERMINATED], signal.SIGTERM, False, TERMINATED),
        ([0, TERMINATED], signal.SIGINT, False, -signal.SIGINT),
        ([KILLED], signal.SIGINT, False, -signal.SIGINT),  # after the grace
        ([TERMINATED, 3], signal.SIGTERM, False, 3),
        ([TERMINATED, 3, 4], signal.SIGTERM, False, 3),  # the first that ended
        ([0, 4, 3], signal.SIGTERM, True, 4),
    ],
)
def test_a_ranks_own_code_wins_over_the_signal_that_ended_the_job(
    codes: list[int], ended_by: int | None, forced: bool, code: int
) -> None:
    assert code_of_ended_job(codes, ended_by, forced=forced) == code


@pytest.mark.parametrize(
    ("code", "shown"), [(0, 0), (3, 3), (255, 255), (KILLED, 137), (-signal.SIGINT, 130)]
)
def test_a_code_is_told_as_a_shell_does(code: int, shown: int) -> None:
    assert shell_code(code) == shown


def test_a_report_tells_an_exit_code_from_a_signal() -> None:
    def report(code: int) -> str:
        return Outcome(code, RankFailure(3, "host", 42, code)).report()

    assert report(7) == "acclimate run: rank 3 (host host, pid 42) ended with exit code 7.\n"
    assert report(KILLED) == "acclimate run: rank 3 (host host, pid 42) was killed by SIGKILL (signal 9).\n"


def test_the_first_of_two_signals_is_the_one_that_ended_the_job(tmp_path: Path) -> None:
    text = """
signal.signal(signal.SIGTERM, lambda *_: ready(f"heard{rank}"))
signal.signal(signal.SIGHUP, signal.SIG_DFL)
ready()
wait()
"""
    with launched(command(2, ranks_code(tmp_path, text), "--grace", "30")) as job:
        all_ready(tmp_path, 2)
        job.signal(signal.SIGTERM)
        wait_until(lambda: {"heard0", "heard1"} <= names_in(tmp_path), "the first to be heard")
        job.signal(signal.SIGHUP)
        _, stderr = job.read()
        assert job.wait() == 128 + signal.SIGTERM
    assert "SIGTERM was forwarded" in stderr


def test_the_code_of_the_rank_that_ended_first_is_the_jobs_after_a_signal(tmp_path: Path) -> None:
    text = """
def leave(*_):
    if rank == 0:
        guard = Path("/proc", (folder / "guard1").read_text())
        while guard.exists(): time.sleep(0.01)  # it notes when its rank ended
    sys.exit(3 + rank)
signal.signal(signal.SIGTERM, leave)
(folder / f"guard{rank}").write_text(str(os.getppid()))
ready()
wait()
"""
    with launched(command(2, ranks_code(tmp_path, text), "--grace", "30")) as job:
        all_ready(tmp_path, 2)
        job.signal(signal.SIGTERM)
        _, stderr = job.read()
        assert job.wait() == 4
    assert "rank 1 (" not in stderr


def test_a_rank_that_fails_by_itself_is_blamed_though_the_job_is_ended_afterwards(tmp_path: Path) -> None:
    text = """
signal.signal(signal.SIGTERM, lambda *_: ready("ending"))
ready()
while not (folder / "go").exists(): time.sleep(0.01)
if rank == 1: sys.exit(5)
wait()
"""
    with launched(command(2, ranks_code(tmp_path, text), "--grace", "30")) as job:
        all_ready(tmp_path, 2)
        (tmp_path / "go").touch()
        wait_until(lambda: "ending" in names_in(tmp_path), "the other rank to be ended")
        job.signal(signal.SIGINT)  # now: at once
        _, stderr = job.read()
        assert job.wait() == 5
        assert job.living() == {}
    assert "rank 1 (" in stderr
