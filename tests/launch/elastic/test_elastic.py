"""Elastic jobs: ranks restart, and hosts join and leave; each test runs `acclimate run`."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import (
    all_ready,
    command,
    launched,
    names_in,
    pid_in,
    ranks_code,
    run,
    state_of,
    wait_until,
)
from torch.distributed import HashStore

from acclimate.launch.elastic import torch_agent
from ports import free_port

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


@pytest.mark.usefixtures("warm_starts")
def test_a_killed_rank_is_started_anew_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    ended = run(2, COUNTING.format(folder=str(tmp_path)), "--max_restarts", "2", "--bind_cores_to_rank")
    assert ended.returncode == 0, ended.stderr
    assert "[rank 1] from step 0 restart 0\n" in ended.stdout
    assert "[rank 1] from step 10 restart 1\n" in ended.stdout
    assert [(tmp_path / f"steps{rank}").read_text() for rank in range(2)] == ["20", "20"]
    assert "rank 1 (host " in ended.stderr
    assert "was killed by SIGKILL" in ended.stderr
    assert ended.stderr.count("restarting") == 1
    assert "acclimate run: restarting, 1 of 2 times.\n" in ended.stderr


@pytest.mark.slow
def test_a_rank_that_fails_every_time_ends_the_job_with_its_own_code(tmp_path: Path) -> None:
    # Its last lines are more than a pipe takes.
    code = f"""
import os
import re
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


@contextmanager
def deaf_server(greeting: bytes = b"") -> Iterator[tuple[int, threading.Event]]:
    """A port that accepts connections and says nothing but perhaps a greeting; an event tells of a call."""
    kept: list[socket.socket] = []
    called = threading.Event()

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                kept.append(connection)
                connection.sendall(greeting)
                called.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1], called
        server.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()


def meeting_at(port: int, host: str = "127.0.0.1") -> list[str]:
    return ["--min_nodes", "2", "--max_nodes", "2", "--master_addr", host, "--master_port", str(port)]


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize("greeting", [b"", pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", marks=pytest.mark.slow)])
def test_a_meeting_place_that_accepts_and_says_nothing_is_named(greeting: bytes) -> None:
    patience = "torch_agent._PROBE_AFTER_S, torch_agent._SILENCE_S = 0.1, 1.0"  # instead of 5 s and 15 s
    with deaf_server(greeting) as (port, _):
        arguments = command(1, "pass", *meeting_at(port))[3:]
        code = f"""
import sys
from acclimate.cli import main
from acclimate.launch.elastic import torch_agent
{patience}
sys.exit(main({arguments!r}))
"""
        with launched([sys.executable, "-c", code]) as job:
            _, stderr = job.read()
            assert job.wait() == 2
            assert job.living() == {}
    assert f"the rendezvous at 127.0.0.1:{port} " in stderr
    assert greeting or "accepts connections but does not answer" in stderr
    assert "Traceback" not in stderr


def test_a_silent_meeting_place_is_named_within_half_a_minute() -> None:
    assert torch_agent._PROBE_AFTER_S + torch_agent._SILENCE_S + 3 * torch_agent._LOOK_AGAIN_S < 30


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_the_wait_for_a_meeting_place_that_says_nothing(number: int) -> None:
    with deaf_server() as (port, called), launched(command(1, "pass", *meeting_at(port))) as job:
        assert called.wait(30)
        job.signal(number)
        _, stderr = job.read()
        assert job.wait() == 128 + number
        assert job.living() == {}
    assert stderr.endswith(f"{signal.Signals(number).name} ended the wait for other hosts.\n")


@pytest.mark.slow
def test_a_notice_reaches_elastic_ranks_and_ends_nothing_and_what_is_ignored_stays_so(tmp_path: Path) -> None:
    text = """
signal.signal(signal.SIGUSR1, lambda *_: ready("noticed"))
ready()
while not (folder / "go").exists(): time.sleep(0.01)
"""
    with launched(["nohup", *command(1, ranks_code(tmp_path, text), "--max_restarts", "1")]) as job:
        all_ready(tmp_path, 1)
        job.signal(signal.SIGHUP)
        job.signal(signal.SIGUSR1)
        wait_until(lambda: "noticed" in names_in(tmp_path), "the notice")
        (tmp_path / "go").touch()
        job.read()
        assert job.wait() == 0


@pytest.mark.slow
def test_a_paused_elastic_launcher_pauses_its_ranks(tmp_path: Path) -> None:
    text = "ready()\nwhile not (folder / 'go').exists(): time.sleep(0.01)"
    # As a shell starts it: in a group of its own, in the session of who could continue it.
    in_a_group = {"start_new_session": False, "preexec_fn": os.setpgrp}
    with launched(command(1, ranks_code(tmp_path, text), "--max_restarts", "1"), **in_a_group) as job:
        all_ready(tmp_path, 1)
        rank = pid_in(tmp_path / "ready0")
        job.signal(signal.SIGTSTP)
        wait_until(lambda: state_of(job.process.pid) == "T", "the launcher to stop")
        wait_until(lambda: state_of(rank) == "T", "the rank to stop")
        job.signal(signal.SIGCONT)
        wait_until(lambda: state_of(rank) in "SR", "the rank to go on")
        (tmp_path / "go").touch()
        assert job.wait() == 0


@pytest.mark.slow
def test_ctrl_c_ends_ranks_whose_meeting_place_is_frozen(tmp_path: Path) -> None:
    options = [*meeting_at(free_port()), "--grace", "0.5"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with launched(command(1, ranks_code(tmp_path / "a", "ready()\nwait()"), *options)) as a:
        wait_until(lambda: is_listening(int(options[7])), "the meeting place to open")
        with launched(command(1, ranks_code(tmp_path / "b", "ready()\nwait()"), *options)) as b:
            wait_until(lambda: names_in(tmp_path / "a") and names_in(tmp_path / "b"), "both ranks to start")
            a.signal(signal.SIGSTOP)
            b.signal(signal.SIGINT)
            _, stderr = b.read()
            assert b.wait() == 130
            assert b.living() == {}
        assert "acclimate run: SIGINT was forwarded, and the ranks have ended.\n" in stderr
        a.signal(signal.SIGCONT)


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
    assert re.search(rb"the rendezvous at 192\.0\.2\.1:\d+ does not answer", stderr)


def test_a_host_that_is_lost_while_the_others_ranks_end_is_told_in_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    waiting: Any = object.__new__(torch_agent._Agent)
    waiting._store = HashStore()
    waiting._worker_group = SimpleNamespace(group_world_size=2)
    waiting._exit_barrier_timeout = 1
    waiting._exit_barrier()
    note = "acclimate run: a host did not report the end of its ranks within 1 s.\n"
    assert capfd.readouterr() == ("", note)


def test_elastic_hosts_are_started_by_hand(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=1\ntwo slots=1\n")
    ended = run(1, "pass", "--hostfile", str(hosts), "--max_restarts", "1")
    assert ended.returncode == 2
    assert "run the same command on each host" in ended.stderr
    ended = run(1, "pass", "--max_nodes", "2")
    assert ended.returncode == 2
    assert "--max_nodes needs --master_addr" in ended.stderr


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
        assert re.search(r"the rendezvous at \S+ no longer answers", stderr)
        wait_until(lambda: not a.living(), "the first host's ranks to end with it")


@pytest.mark.slow
@pytest.mark.skipif(not EXAMPLE.exists(), reason="the training example is not here")
def test_training_goes_on_from_its_checkpoint_when_a_rank_is_killed(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "acclimate", "run", "--num_accelerators", "2", "--max_restarts", "2"]
    steps = ["--steps", "60", "--checkpoint-every", "5", "--out", str(tmp_path), "--resume"]
    steps += ["--layers=1", "--heads=2", "--width=32", "--context=32", "--batch=4", "--validate-every=60"]
    with launched([*launcher, str(EXAMPLE), *steps], variables={"DS_ACCELERATOR": "cpu"}) as job:
        wait_until(lambda: any((tmp_path / "checkpoints").glob("*")), "the first checkpoint", 120)
        ranks = [pid for pid in job.living() if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
        os.kill(ranks[0], signal.SIGKILL)
        stdout, stderr = job.read(120)
        assert job.wait() == 0, stderr
    assert "restarting, 1 of 2 times" in stderr
    assert "resuming from " in stdout, stdout
