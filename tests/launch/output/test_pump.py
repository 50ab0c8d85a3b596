"""Readers of the launcher's output that are slow, or gone: nothing is lost, and the job still ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launching import command, environment, launched, run, wait_until


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reader_that_leaves_early_ends_the_job(ranks: int) -> None:
    code = "import itertools, time\nfor n in itertools.count(): print(n); time.sleep(0.001)"
    with launched(command(ranks, code, "--grace", "30")) as job:
        assert job.process.stdout is not None
        os.read(job.process.stdout.fileno(), 10)
        job.process.stdout.close()
        assert job.process.stderr is not None
        complaint = job.process.stderr.read().decode()
        assert job.wait() == 128 + signal.SIGPIPE
        assert job.living() == {}
    assert complaint == "acclimate run: nobody reads standard output any more, so the ranks were ended.\n"


def test_head_is_not_kept_waiting() -> None:
    code = "import itertools, time\nfor n in itertools.count(): print(n); time.sleep(0.001)"
    shown = subprocess.run(
        ["sh", "-c", '"$@" 2>/dev/null | head -n 2', "sh", *command(1, code)],
        capture_output=True,
        env=environment(),
        timeout=60,
    )
    assert shown.stdout == b"0\n1\n"


def test_a_slow_reader_slows_the_ranks_and_loses_nothing(tmp_path: Path) -> None:
    code = f"""
import sys
block, count = "x" * 9999 + "\\n", open({str(tmp_path / "count")!r}, "ab", buffering=0)
for n in range(500): sys.stdout.write(block); count.write(b".")
"""
    with launched(command(1, code)) as job:
        assert job.process.stdout is not None
        count = tmp_path / "count"
        wait_until(lambda: count.exists() and count.stat().st_size, "the first block")
        before = 0
        while before != count.stat().st_size:
            before = count.stat().st_size
            time.sleep(0.3)
        assert before < 400, "the launcher keeps no more than about a megabyte"
        stdout, _ = job.read()
        assert job.wait() == 0
    assert len(stdout) == 5_000_000


def test_a_slow_reader_does_not_keep_a_failure_from_ending_the_job(tmp_path: Path) -> None:
    failing = tmp_path / "failing"
    code = f"""
import os, pathlib, sys, time
if os.environ["RANK"] == "0":
    while True: print("x" * 1000)
time.sleep(0.3)
pathlib.Path({str(failing)!r}).touch()
sys.exit(3)
"""
    with launched(command(2, code)) as job:
        wait_until(failing.exists, "a rank to fail")
        wait_until(lambda: len(job.living()) == 1, "only the launcher to be left, with what was not read")
        assert job.process.stdout is not None
        while os.read(job.process.stdout.fileno(), 1 << 16):
            pass
        assert job.wait() == 3


def test_ctrl_c_ends_a_launcher_whose_output_nobody_takes(tmp_path: Path) -> None:
    done = tmp_path / "done"
    code = f"import pathlib; print('x' * 500_000); pathlib.Path({str(done)!r}).touch()"
    with launched(command(1, code)) as job:
        wait_until(done.exists, "the rank to write")
        wait_until(lambda: len(job.living()) == 1, "the rank to end")
        job.signal(signal.SIGINT)
        assert job.wait() == 0, "the rank had ended well by itself"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the kernel's full disk is not here")
def test_standard_output_on_a_full_disk_is_told_and_the_job_goes_on(tmp_path: Path) -> None:
    code = f"import pathlib; print('x'); pathlib.Path({str(tmp_path / 'done')!r}).touch()"
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            command(1, code), stdout=full, stderr=subprocess.PIPE, env=environment(), timeout=60, text=True
        )
    assert (ended.returncode, (tmp_path / "done").exists()) == (0, True)
    assert ended.stderr == (
        "acclimate run: standard output cannot be written (No space left on device); the ranks go on.\n"
    )


def test_closed_standard_streams_are_no_obstacle(tmp_path: Path) -> None:
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'done')!r}).touch()"
    ended = subprocess.run(
        ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command(2, code)], env=environment(), timeout=60
    )
    assert (ended.returncode, (tmp_path / "done").exists()) == (0, True)


def test_standard_input_is_the_only_ranks_or_the_first_ones() -> None:
    code = "import sys; print(sys.stdin.read())"
    for ranks, shown in ((1, ["hello"]), (2, ["[rank 0] hello", "[rank 1] "])):
        ended = subprocess.run(
            command(ranks, code), input="hello", capture_output=True, text=True, env=environment(), timeout=60
        )
        assert sorted(ended.stdout.splitlines()) == shown


def test_a_lot_of_output_of_many_ranks_arrives_whole() -> None:
    code = "import os\nfor n in range(2000): print(os.environ['RANK'], n, 'x' * 50)"
    ended = run(4, code)
    lines = ended.stdout.splitlines()
    for rank in range(4):
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert own == [f"[rank {rank}] {rank} {n} {'x' * 50}" for n in range(2000)]
