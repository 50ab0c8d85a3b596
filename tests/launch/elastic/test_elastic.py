"""Elastic jobs: ranks that are started anew, hosts that come and go; each is an `acclimate run`."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from launching import command, launched, run, wait_until

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_gpt.py"

COUNTING = """
import json, os, signal, sys, time
from pathlib import Path
rank, folder = os.environ["RANK"], Path({folder!r})
steps = folder / f"steps{{rank}}"
done = int(steps.read_text()) if steps.exists() else 0
print("from step", done, "restart", os.environ["TORCHELASTIC_RESTART_COUNT"])
while done < 20:
    done += 1
    steps.with_suffix(".new").write_text(str(done))
    steps.with_suffix(".new").rename(steps)
    if done == 10 and rank == "1": os.kill(os.getpid(), signal.SIGKILL)
"""
"""A "training" of 20 steps with a checkpoint at each, in which rank 1 dies once; it needs no torch."""


def test_a_killed_rank_is_started_anew_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    ended = run(2, COUNTING.format(folder=str(tmp_path)), "--max_restarts", "2", "--bind_cores_to_rank")
    assert ended.returncode == 0, ended.stderr
    assert "[rank 1] from step 0 restart 0\n" in ended.stdout
    assert "[rank 1] from step 10 restart 1\n" in ended.stdout
    assert [(tmp_path / f"steps{rank}").read_text() for rank in range(2)] == ["20", "20"]
    assert "rank 1 (host " in ended.stderr
    assert "was killed by SIGKILL" in ended.stderr
    assert "acclimate run: starting anew, 1 of 2 times.\n" in ended.stderr


@pytest.mark.slow
def test_a_rank_that_fails_every_time_ends_the_job_with_its_own_code(tmp_path: Path) -> None:
    # Its last lines are more than a pipe takes.
    code = f"""
import os
for _ in range(20): os.write(1, b"\\xff" * 1990 + b"\\n")
open({str(tmp_path / "starts")!r}, "a").write("x")
raise SystemExit(7)
"""
    ended = run(1, code, "--max_restarts", "1")
    assert ended.returncode == 7
    assert (tmp_path / "starts").read_text() == "xx"
    assert ended.stderr.splitlines()[-1].endswith("ended with exit code 7.")


@pytest.mark.slow
def test_ctrl_c_is_no_reason_to_start_anew(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = f"""
import signal, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
open({str(started)!r}, "a").write("x")
time.sleep(600)
"""
    with launched(command(1, code, "--max_restarts", "3")) as job:
        wait_until(lambda: started.exists() and started.read_text(), "the rank to start")
        job.signal(signal.SIGINT)
        job.read()
        assert job.wait() == 130
        assert job.living() == {}
    assert started.read_text() == "x"


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_for_other_hosts(tmp_path: Path) -> None:
    port = free_port()
    options = ["--min_nodes", "2", "--max_nodes", "2", "--master_addr", "127.0.0.1"]
    options += ["--master_port", str(port)]
    with launched(command(1, "pass", *options)) as job:
        wait_until(lambda: is_listening(port), "the meeting place to open")
        job.signal(signal.SIGINT)
        _, stderr = job.read()
        assert job.wait() == 130
        assert job.living() == {}
    assert "Traceback" not in stderr


def is_listening(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_nothing_is_left_when_an_elastic_launcher_is_killed(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(600)"
    with launched(command(1, code, "--max_restarts", "3", "--grace", "0.3")) as job:
        wait_until(started.exists, "the rank to start")
        job.signal(signal.SIGKILL)
        job.wait()
        wait_until(lambda: not job.living(), "the end of the rank")


@pytest.mark.slow
def test_a_meeting_place_where_nobody_answers_is_told() -> None:
    options = ["--max_nodes", "2", "--master_addr", "192.0.2.1", "--master_port", str(free_port())]
    with launched(command(1, "pass", *options)) as job:
        _, stderr = job.process.communicate(timeout=120)  # torch waits a minute for it to come up
        assert job.wait() == 2
    assert b"nobody answers at 192.0.2.1:" in stderr


def test_elastic_hosts_are_started_by_hand(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=1\ntwo slots=1\n")
    ended = run(1, "pass", "--hostfile", str(hosts), "--max_restarts", "1")
    assert ended.returncode == 2
    assert "run the same command on each host" in ended.stderr
    ended = run(1, "pass", "--max_nodes", "2")
    assert ended.returncode == 2
    assert "--max_nodes needs --master_addr" in ended.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


WORLD = """
import os, sys, time
from pathlib import Path
folder, host = Path({folder!r}), {host!r}
(folder / f"{{host}}-{{os.environ['WORLD_SIZE']}}-{{time.monotonic()}}").write_text(os.environ["RANK"])
lost = folder / f"lost-{{host}}"
while not lost.exists(): time.sleep(0.05)
lost.unlink()
sys.exit(1)  # as a collective does when a peer is gone
"""


@pytest.mark.slow
def test_a_host_that_goes_away_and_comes_back_is_admitted_again(tmp_path: Path) -> None:
    options = ["--min_nodes", "1", "--max_nodes", "2", "--max_restarts", "3", "--grace", "0.5"]
    options += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]

    def host(name: str) -> list[str]:
        return command(1, WORLD.format(folder=str(tmp_path), host=name), *options)

    def worlds(name: str) -> list[int]:
        """The sizes of the worlds that a host was in, in their order."""
        marks = sorted(
            (path.name.split("-") for path in tmp_path.glob(f"{name}-*")), key=lambda mark: mark[2]
        )
        return [int(mark[1]) for mark in marks]

    with launched(host("a")) as a:
        wait_until(lambda: worlds("a") == [1], "the first host to begin alone")
        with launched(host("b")) as b:
            wait_until(lambda: worlds("a") == [1, 2] and worlds("b") == [2], "both to go on together")
            b.signal(signal.SIGKILL)
            wait_until(lambda: not b.living(), "the second host's ranks to end with it")
        (tmp_path / "lost-a").touch()
        wait_until(lambda: worlds("a") == [1, 2, 1], "the first to go on alone")
        with launched(host("c")) as c:
            wait_until(lambda: worlds("a") == [1, 2, 1, 2] and worlds("c") == [2], "the second to be back")
            a.signal(signal.SIGKILL)  # where all of them meet
            _, stderr = c.read()
            assert c.wait() == 1
            assert c.living() == {}
        assert "where the job's hosts meet, does not answer any more" in stderr
        wait_until(lambda: not a.living(), "the first host's ranks to end with it")


@pytest.mark.slow
@pytest.mark.skipif(not EXAMPLE.exists(), reason="the training example is not here")
def test_training_goes_on_from_its_checkpoint_when_a_rank_is_killed(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "acclimate", "run", "--num_accelerators", "2", "--max_restarts", "2"]
    steps = ["--steps", "60", "--checkpoint-every", "5", "--out", str(tmp_path), "--resume"]
    steps += ["--layers=1", "--heads=2", "--width=32", "--context=32", "--batch=4", "--validate-every=60"]
    with launched([*launcher, str(EXAMPLE), *steps], variables={"DS_ACCELERATOR": "cpu"}) as job:
        wait_until(lambda: any((tmp_path / "checkpoints").glob("*")), "the first checkpoint")
        ranks = [pid for pid in job.living() if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
        os.kill(ranks[0], signal.SIGKILL)
        stdout, stderr = job.read(120)
        assert job.wait() == 0, stderr
    assert "starting anew, 1 of 2 times" in stderr
    assert "resuming from " in stdout, stdout
