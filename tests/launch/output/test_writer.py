"""The last lines that a rank wrote, and its log file."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import command, environment, run
from paper import Counted

from acclimate.launch.output.writer import LogFile, Tail


def test_the_tail_keeps_the_last_20_lines_of_both_streams_in_order() -> None:
    tail = Tail()
    for number in range(30):
        tail.feed(1 + number % 2, f"{number}\n".encode())
    assert tail.lines() == tuple(str(number) for number in range(10, 30))


def test_the_tail_shows_the_last_state_of_a_progress_bar_and_what_was_unfinished() -> None:
    tail = Tail()
    tail.feed(2, b"\r10%\r20%")
    tail.feed(2, b"\r100%\n")
    tail.feed(1, b"almost \xff")
    assert tail.lines() == ("100%", "almost \\xff")


def test_a_tail_of_many_lines_at_once_is_the_last_20() -> None:
    tail = Tail()
    tail.feed(1, b"begun")
    tail.feed(1, b"".join(b" %d\n" % number for number in range(100)) + b"rest")
    assert tail.lines() == (*(f" {number}" for number in range(81, 100)), "rest")
    tail.feed(1, b" of it\n")
    assert tail.lines()[-2:] == (" 99", "rest of it")


@given(st.binary(max_size=5000), st.integers(1, 700))
def test_the_tail_takes_anything(data: bytes, size: int) -> None:
    tail = Tail()
    for start in range(0, len(data), size):
        tail.feed(1, data[start : start + size])
    assert len(tail.lines()) <= 20
    assert all("\n" not in line for line in tail.lines())


def test_the_tail_of_an_endless_line_costs_each_byte_once_and_little_memory() -> None:
    tail = Tail()
    Counted.copied = 0
    for _ in range(5000):
        tail.feed(1, Counted(b"x" * 10))
    assert Counted.copied <= 2 * 50_000
    assert tail.lines() == ("x" * 2000,)


# -- logs --------------------------------------------------------------------------------------------


def test_each_rank_has_a_log_file_of_its_own_besides(tmp_path: Path) -> None:
    logs = tmp_path / "not" / "there"
    code = "import os, sys; print('out of', os.environ['RANK']); print('err', file=sys.stderr)"
    ended = run(2, code, "--log_dir", str(logs))
    assert sorted(ended.stdout.splitlines()) == ["[rank 0] out of 0", "[rank 1] out of 1"]
    for rank in range(2):
        assert sorted((logs / f"rank_{rank}.log").read_text().splitlines()) == ["err", f"out of {rank}"]


def test_a_second_run_does_not_take_away_the_first_ones_log(tmp_path: Path) -> None:
    for text in ("first", "second"):
        run(1, f"print({text!r})", "--log_dir", str(tmp_path))
    assert (tmp_path / "rank_0.log").read_text() == "first\nsecond\n"


def test_a_log_folder_that_cannot_be_made_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = run(1, "print('started')", "--log_dir", str(tmp_path / "file" / "logs"))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "The log of rank 0 cannot be written: Not a directory" in ended.stderr
    assert "--log_dir" in ended.stderr


def test_a_log_that_is_a_pipe_without_a_reader_is_an_error_instead_of_an_endless_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank_0.log")
    ended = run(1, "print('started')", "--log_dir", str(tmp_path))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "The log of rank 0 cannot be written: No such device or address" in ended.stderr


def test_a_pipe_whose_reader_stalls_ends_the_log_and_not_the_job(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    ended = run(1, "print('x' * 1_000_000)", "--log_dir", str(tmp_path))
    os.close(reader)
    assert (ended.returncode, len(ended.stdout)) == (2, 1_000_001)
    assert ended.stderr.startswith(
        f"acclimate run: the log of rank 0 ends here: {log}: Resource temporarily unavailable.\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the kernel's full disk is not here")
def test_a_full_disk_ends_the_log_and_fails_the_job_after_its_end(tmp_path: Path) -> None:
    (tmp_path / "rank_1.log").symlink_to("/dev/full")
    code = "import os\nfor n in range(3): print('line', n)"
    ended = run(2, code, "--log_dir", str(tmp_path))
    assert ended.returncode == 2
    assert sorted(ended.stdout.splitlines()) == sorted(
        f"[rank {r}] line {n}" for r in (0, 1) for n in range(3)
    )
    log = tmp_path / "rank_1.log"
    assert ended.stderr == (
        f"acclimate run: the log of rank 1 ends here: {log}: No space left on device.\n"
        f"acclimate run: output is missing: the log {log} ends early (No space left on device).\n"
    )
    assert (tmp_path / "rank_0.log").read_text() == "line 0\nline 1\nline 2\n"


def test_a_log_on_a_small_full_file_system_is_told_with_an_exit_code(tmp_path: Path) -> None:
    on_tmpfs = f'mount -t tmpfs -o size=64k none {tmp_path} && exec "$@"'
    alone = ["unshare", "--mount", "sh", "-c"]
    if os.geteuid() != 0 or subprocess.run([*alone, on_tmpfs, "sh", "true"], check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    job = command(2, "print('x' * 50_000)", "--log_dir", str(tmp_path))
    ended = subprocess.run(
        [*alone, on_tmpfs, "sh", *job], capture_output=True, text=True, env=environment(), timeout=240
    )
    assert (ended.returncode, ended.stdout.count("x")) == (2, 100_000), ended.stderr
    assert "ends early (No space left on device)" in ended.stderr.splitlines()[-1]


def test_a_log_is_closed_with_its_error_kept(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    log.write(b"x" * 100_000)
    log.close()
    assert (log.error, (tmp_path / "log").stat().st_size) == (None, 100_000)
