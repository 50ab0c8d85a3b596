"""Programs that reach hosts: their output ends with them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from acclimate.launch.event_loop import EventLoop
from acclimate.launch.remote.watched_program import WatchedProgram

PATIENCE_S = 30.0


class Watched:
    """A shell command, and what the launcher learns of it, in order."""

    def __init__(self, command: str) -> None:
        self.loop = EventLoop()
        self.output = {1: b"", 2: b""}
        self.events: list[str] = []
        process = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.program = WatchedProgram(self.loop, process, self._received, self._exited)

    def _received(self, stream: int, data: bytes) -> None:
        self.output[stream] += data
        if not data:
            self.events.append(f"end of {stream}")

    def _exited(self, code: int) -> None:
        self.events.append(f"exit {code}")

    def run(self) -> None:
        """Waits for the end of the program."""
        until = time.monotonic() + PATIENCE_S
        while self.program.running and time.monotonic() < until:
            self.loop.wait(until)
        assert not self.program.running
        self.program.close()
        self.loop.close()


@pytest.fixture
def left_behind(tmp_path: Path) -> Iterator[Path]:
    """A file for the pids of processes that a program leaves behind; they are killed after the test."""
    path = tmp_path / "pids"
    yield path
    for pid in map(int, path.read_text().split()):
        os.kill(pid, signal.SIGKILL)


def test_both_streams_are_read_whole_before_the_exit_is_told() -> None:
    watched = Watched("head -c 300000 /dev/zero; echo words >&2; exit 3")
    watched.run()
    assert (len(watched.output[1]), watched.output[2]) == (300000, b"words\n")
    assert (sorted(watched.events[:2]), watched.events[2:]) == (["end of 1", "end of 2"], ["exit 3"])


def test_output_ends_with_the_program_though_a_process_that_it_left_keeps_the_pipe_open(
    left_behind: Path,
) -> None:
    watched = Watched(f"sleep 600 & echo $! > {left_behind}; echo last; exit 0")
    watched.run()
    assert (watched.output[1], watched.events[-1]) == (b"last\n", "exit 0")


def test_output_ends_with_the_program_though_a_process_that_it_left_goes_on_writing(
    left_behind: Path,
) -> None:
    watched = Watched(f"echo first >&2; yes >&2 & echo $! > {left_behind}")
    watched.run()
    assert watched.output[2].startswith(b"first\n")
    assert watched.events[-1] == "exit 0"


def test_the_streams_of_a_program_may_end_long_before_it() -> None:
    watched = Watched("exec >&- 2>&-; sleep 0.3; exit 4")
    while not watched.program.has_closed_its_streams:
        watched.loop.wait(time.monotonic() + PATIENCE_S)
    assert watched.program.running
    watched.run()
    assert watched.events[-1] == "exit 4"


def test_a_killed_program_is_told_with_the_number_of_the_signal() -> None:
    watched = Watched("exec sleep 600")
    watched.program.kill()
    watched.run()
    assert watched.events[-1] == f"exit {-signal.SIGKILL}"
