"""Readers of the launcher's output that are slow, or gone: nothing is lost, and the job still ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from launching import command, environment, launched, run, wait_until
from paper import RANKS

from acclimate.launch.event_loop import EventLoop
from acclimate.launch.output.pump import OutputPump
from acclimate.launch.output.views import Plain
from acclimate.launch.output.writer import StreamWriter, Writer


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
    assert complaint == "acclimate run: the reader of standard output has exited, so the ranks were ended.\n"


def test_head_is_not_kept_waiting() -> None:
    code = "import itertools, time\nfor n in itertools.count(): print(n); time.sleep(0.001)"
    shown = subprocess.run(
        ["sh", "-c", '"$@" 2>/dev/null | head -n 2', "sh", *command(1, code)],
        capture_output=True,
        env=environment(),
        timeout=240,
    )
    assert shown.stdout == b"0\n1\n"


def test_a_reader_that_stalls_gets_the_lines_of_several_ranks_whole() -> None:
    code = """
import os
with open(1, "w", buffering=1 << 20) as out:
    for n in range(400): print(f"<{os.environ['RANK']} {n} {'x' * 3000}>", file=out)
"""
    with launched(command(4, code)) as job:
        assert job.process.stdout is not None
        received = os.read(job.process.stdout.fileno(), 1)
        time.sleep(1)  # longer than an unfinished line is held back
        received += job.process.stdout.read()
        assert job.wait() == 0
    lines = received.decode().splitlines()
    whole = [f"[rank {rank}] <{rank} {n} {'x' * 3000}>" for rank in range(4) for n in range(400)]
    assert sorted(lines) == sorted(whole)


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
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_standard_output_on_a_full_disk_fails_the_job_after_its_end(tmp_path: Path, ranks: int) -> None:
    code = f"import os, pathlib; print('x'); pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).touch()"
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            command(ranks, code),
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
            timeout=240,
            text=True,
        )
    assert (ended.returncode, len(list(tmp_path.iterdir()))) == (2, ranks)
    failure = "standard output cannot be written (No space left on device)"
    assert ended.stderr == (
        f"acclimate run: {failure}; the ranks continue.\nacclimate run: output is missing: {failure}.\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the kernel's full disk is not here")
def test_a_rank_that_fails_keeps_its_exit_code_where_its_output_cannot_be_written() -> None:
    with open("/dev/full", "wb") as full:
        failing = command(1, "print('x'); raise SystemExit(7)")
        ended = subprocess.run(failing, stdout=full, stderr=subprocess.PIPE, env=environment(), timeout=240)
    assert ended.returncode == 7
    assert b"output is missing" in ended.stderr


def test_closed_standard_streams_are_no_obstacle(tmp_path: Path) -> None:
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'done')!r}).touch()"
    ended = subprocess.run(
        ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command(2, code)], env=environment(), timeout=240
    )
    assert (ended.returncode, (tmp_path / "done").exists()) == (0, True)


def test_standard_input_is_the_only_ranks_or_the_first_ones() -> None:
    code = "import sys; print(sys.stdin.read())"
    for ranks, shown in ((1, ["hello"]), (2, ["[rank 0] hello", "[rank 1] "])):
        ended = subprocess.run(
            command(ranks, code),
            input="hello",
            capture_output=True,
            text=True,
            env=environment(),
            timeout=240,
        )
        assert sorted(ended.stdout.splitlines()) == shown


def test_a_lot_of_output_of_many_ranks_arrives_whole() -> None:
    code = "import os\nfor n in range(2000): print(os.environ['RANK'], n, 'x' * 50)"
    ended = run(4, code)
    lines = ended.stdout.splitlines()
    for rank in range(4):
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert own == [f"[rank {rank}] {rank} {n} {'x' * 50}" for n in range(2000)]


# -- the pump itself ---------------------------------------------------------------------------------


class Pumped:
    """Pipes that a pump reads, onto other pipes in the place of the launcher's streams."""

    def __init__(self) -> None:
        self.loop, self.errors = EventLoop(), list[tuple[int, OSError]]()
        self.ends = {stream: os.pipe() for stream in (1, 2)}
        views = {stream: Plain(StreamWriter(writing)) for stream, (_, writing) in self.ends.items()}
        self.pump = OutputPump(self.loop, views, lambda *error: self.errors.append(error))
        self.read = {1: 0, 2: 0}

    def add(self, stream: int) -> int:
        """A pipe that is always full; how much was read from it is counted in ``read``."""
        zeros = os.open("/dev/zero", os.O_RDONLY)

        def react() -> None:
            data = os.read(zeros, 1 << 16)
            self.read[stream] += len(data)
            self.pump.feed(stream, RANKS[0], data)

        self.pump.read_from(zeros, stream, react)
        return zeros

    def run(self, times: int) -> None:
        for _ in range(times):
            self.loop.wait(0.0)


@pytest.fixture
def pumped() -> Iterator[Pumped]:
    made = Pumped()
    yield made
    made.loop.close()
    for ends in made.ends.values():
        for end in ends:
            with suppress(OSError):
                os.close(end)


def test_what_is_not_taken_is_not_read_and_the_other_stream_goes_on(pumped: Pumped) -> None:
    sources = [pumped.add(1), pumped.add(2)]
    for _ in range(100):
        pumped.run(1)
        os.set_blocking(pumped.ends[2][0], False)
        with suppress(BlockingIOError):
            os.read(pumped.ends[2][0], 1 << 20)
    assert Writer.FULL <= pumped.read[1] < Writer.FULL + (4 << 16)
    assert pumped.read[2] > 2 * Writer.FULL
    for source in sources:
        pumped.pump.forget(source)
        os.close(source)


def test_reading_goes_on_when_the_reader_has_caught_up(pumped: Pumped) -> None:
    source = pumped.add(1)
    pumped.run(100)
    before, taken = pumped.read[1], 0
    os.set_blocking(pumped.ends[1][0], False)
    while pumped.read[1] < 2 * before:
        with suppress(BlockingIOError):
            taken += len(os.read(pumped.ends[1][0], 1 << 16))
        pumped.run(1)
    pumped.pump.forget(source)
    while pumped.pump.waiting:
        with suppress(BlockingIOError):
            taken += len(os.read(pumped.ends[1][0], 1 << 16))
        pumped.run(1)
    with suppress(BlockingIOError):
        while True:
            taken += len(os.read(pumped.ends[1][0], 1 << 16))
    assert taken == pumped.read[1]
    os.close(source)


def test_a_source_that_comes_while_the_stream_is_full_waits_too(pumped: Pumped) -> None:
    first = pumped.add(1)
    pumped.run(100)
    before = pumped.read[1]
    second = pumped.add(1)
    pumped.run(3)
    assert pumped.read[1] == before
    for source in (first, second):
        pumped.pump.forget(source)
        os.close(source)
    while pumped.pump.waiting:
        os.read(pumped.ends[1][0], 1 << 16)
        pumped.run(1)


def test_a_stream_that_fails_is_reported_once(pumped: Pumped) -> None:
    os.close(pumped.ends[2][0])
    for _ in range(3):
        pumped.pump.feed(2, RANKS[0], b"x")
    pumped.pump.flush()
    assert [(stream, type(error)) for stream, error in pumped.errors] == [(2, BrokenPipeError)]
    assert not pumped.pump.waiting


def test_both_streams_share_a_view_where_they_are_the_same_file() -> None:
    code = """
from acclimate.launch.event_loop import EventLoop
from acclimate.launch.output.pump import own_streams
from acclimate.launch.output.views import Plain
views = own_streams(Plain)
open("{}", "w").write(str(views[1] is views[2]))
"""
    for redirection, same in (("2>&1 | cat", "True"), ("2>/dev/null | cat", "False")):
        with tempfile.NamedTemporaryFile() as answer:
            script = code.format(answer.name)
            subprocess.run(
                ["sh", "-c", f'"$@" {redirection}', "sh", sys.executable, "-c", script],
                check=True,
                env=environment(),
            )
            assert answer.read().decode() == same
