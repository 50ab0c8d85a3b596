"""What /proc says of a process, and the words for its end."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from acclimate.host.process_status import how_it_ended, signal_name, stat_fields


def test_the_fields_begin_with_the_state_and_the_parent_whatever_the_name_holds(tmp_path: Path) -> None:
    program = tmp_path / "a) Z (b"
    program.symlink_to(shutil.which("sleep") or "sleep")
    with subprocess.Popen([program, "600"]) as process:
        try:
            name, fields = stat_fields(str(process.pid))
        finally:
            process.kill()
    assert (name, fields[0] in (b"S", b"R", b"D"), int(fields[1])) == (b"a) Z (b", True, os.getpid())


def test_a_threads_fields_are_read_too() -> None:
    thread = ctypes.CDLL(None).gettid()
    assert stat_fields(f"self/task/{thread}")[1][0] == b"R"


def test_a_process_that_does_not_exist_is_an_os_error() -> None:
    with pytest.raises(FileNotFoundError):
        stat_fields("0")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL (signal 9)"),
        (-40, "was killed by signal 40"),
    ],
)
def test_an_end_is_told_with_its_code_or_signal(code: int, words: str) -> None:
    assert how_it_ended(code) == words


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    assert (signal_name(15), signal_name(40)) == ("SIGTERM", "signal 40")
