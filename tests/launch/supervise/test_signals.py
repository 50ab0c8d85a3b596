"""Which signals reach the ranks, and what they end; each is an `acclimate run`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from launching import (
    all_ready,
    command,
    launched,
    names_in,
    pid_in,
    ranks_code,
    state_of,
    wait_until,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers and /proc")


TELLING = """
def tell(number, frame):
    ready(f"got{number}-{rank}")
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT): signal.signal(number, tell)
ready()
wait()
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(
            pytest.param(number, marks=pytest.mark.slow)
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        ),
    ],
)
def test_a_signal_to_the_launcher_reaches_every_rank(number: int, tmp_path: Path) -> None:
    with launched(command(2, ranks_code(tmp_path, TELLING))) as job:
        all_ready(tmp_path, 2)
        job.signal(number)
        job.read()
        assert job.wait() == 0, "both ranks dealt with it and ended well"
    assert {f"got{int(number)}-0", f"got{int(number)}-1"} <= names_in(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ranks_that_do_not_deal_with_a_signal_make_128_plus_it(number: int, tmp_path: Path) -> None:
    text = "signal.signal(signal.SIGINT, signal.SIG_DFL)\nready()\ntime.sleep(600)"
    with launched(command(2, ranks_code(tmp_path, text))) as job:
        all_ready(tmp_path, 2)
        job.signal(number)
        _, stderr = job.read()
        assert job.wait() == 128 + number
    assert (
        stderr == f"acclimate run: {signal.Signals(number).name} was forwarded, and the ranks have ended.\n"
    )


def test_a_rank_that_hangs_after_ctrl_c_is_killed_after_the_grace(tmp_path: Path) -> None:
    text = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nready()\ntime.sleep(600)"
    with launched(command(2, ranks_code(tmp_path, text), "--grace", "0.3")) as job:
        all_ready(tmp_path, 2)
        job.signal(signal.SIGINT)
        job.read()
        assert job.wait() == 130
        assert job.living() == {}


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    text = "signal.signal(signal.SIGINT, lambda *_: ready(f'heard{rank}'))\nready()\nwait()"
    with launched(command(2, ranks_code(tmp_path, text), "--grace", "600")) as job:
        all_ready(tmp_path, 2)
        job.signal(signal.SIGINT)
        wait_until(lambda: {"heard0", "heard1"} <= names_in(tmp_path), "the first to be heard")
        job.signal(signal.SIGINT)
        _, stderr = job.read()
        assert "does not respond" not in stderr
        assert job.wait() == 130
        assert job.living() == {}


def test_a_schedulers_notice_reaches_the_ranks_and_ends_nothing(tmp_path: Path) -> None:
    text = """
signal.signal(signal.SIGUSR1, lambda *_: ready(f"noticed{rank}"))
ready()
while not (folder / "go").exists(): time.sleep(0.01)
"""
    with launched(command(2, ranks_code(tmp_path, text))) as job:
        all_ready(tmp_path, 2)
        job.signal(signal.SIGUSR1)
        wait_until(lambda: {"noticed0", "noticed1"} <= names_in(tmp_path), "the notice")
        (tmp_path / "go").touch()
        assert job.wait() == 0


def test_a_signal_that_the_launcher_was_started_to_ignore_is_ignored_by_all(tmp_path: Path) -> None:
    text = "ready()\nwhile not (folder / 'go').exists(): time.sleep(0.01)"
    with launched(["nohup", *command(2, ranks_code(tmp_path, text))]) as job:
        all_ready(tmp_path, 2)
        job.signal(signal.SIGHUP)
        os.kill(pid_in(tmp_path / "ready0"), signal.SIGHUP)
        time.sleep(0.1)
        (tmp_path / "go").touch()
        assert job.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_launcher_whose_parent_blocked_all_signals_still_passes_them_on(
    number: int, tmp_path: Path
) -> None:
    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

    with launched(command(2, ranks_code(tmp_path, TELLING)), preexec_fn=block) as job:
        all_ready(tmp_path, 2)
        job.signal(number)
        job.read()
        assert job.wait() == 0, "both ranks dealt with it and ended well"
    assert {f"got{int(number)}-0", f"got{int(number)}-1"} <= names_in(tmp_path)


def test_a_paused_launcher_pauses_its_ranks(tmp_path: Path) -> None:
    text = "ready()\nwhile not (folder / 'go').exists(): time.sleep(0.01)"
    # As a shell starts it: in a group of its own, in the session of who could continue it.
    in_a_group = {"start_new_session": False, "preexec_fn": os.setpgrp}
    with launched(command(2, ranks_code(tmp_path, text)), **in_a_group) as job:
        all_ready(tmp_path, 2)
        ranks = [pid_in(tmp_path / f"ready{rank}") for rank in range(2)]
        job.signal(signal.SIGTSTP)
        wait_until(lambda: all(state_of(rank) == "T" for rank in ranks), "the ranks to stop")
        wait_until(lambda: state_of(job.process.pid) == "T", "the launcher to stop")
        job.signal(signal.SIGCONT)
        wait_until(lambda: all(state_of(rank) in "SR" for rank in ranks), "the ranks to go on")
        (tmp_path / "go").touch()
        assert job.wait() == 0
