"""Child processes of checks end, with all that they have started, and say what they were doing."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import psutil
import pytest

from acclimate_conformance.checks.assertions import BrokenPromiseError
from acclimate_conformance.checks.children import Child, in_fork

LEAVES_A_FORK = """
import os, pathlib, time

def task(source, file, waits):
    if (fork := os.fork()) == 0:
        time.sleep(600)
    pathlib.Path(file).with_suffix(".new").write_text(str(fork))
    pathlib.Path(file).with_suffix(".new").rename(file)
    time.sleep(waits)
    return "done"
"""


def child_of(folder: Path, module: str, started: Path, **arguments: object) -> Child:
    """A process that calls the function ``task`` of a module."""
    (folder / "waiting_task.py").write_text(module)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        return Child("waiting_task:task", "cpu", {"file": str(started), **arguments}, environment)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 120
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def test_a_child_that_does_not_finish_is_told_with_the_call_that_it_is_in(tmp_path: Path) -> None:
    module = """
import pathlib, time

def waits_for_ever(file):
    pathlib.Path(file).touch()
    time.sleep(600)

def task(source, file):
    waits_for_ever(file)
"""
    started = tmp_path / "started"
    child = child_of(tmp_path, module, started)
    wait_for(started)
    with pytest.raises(BrokenPromiseError, match=r"was in waits_for_ever \(line 6 of waiting_task.py\)"):
        child.result(timeout_s=0.1)


@pytest.fixture
def forked(tmp_path: Path) -> Path:
    """The file with the number of the process that a task leaves."""
    return tmp_path / "forked"


def test_a_process_that_a_task_leaves_does_not_hold_up_its_answer(tmp_path: Path, forked: Path) -> None:
    child = child_of(tmp_path, LEAVES_A_FORK, forked, waits=0)
    try:
        assert child.result(timeout_s=120) == "done"
    finally:
        psutil.Process(int(forked.read_text())).kill()


def test_a_child_that_is_stopped_leaves_no_process(tmp_path: Path, forked: Path) -> None:
    child = child_of(tmp_path, LEAVES_A_FORK, forked, waits=600)
    wait_for(forked)
    left = psutil.Process(int(forked.read_text()))
    with pytest.raises(BrokenPromiseError, match="did not finish"):
        child.result(timeout_s=0.1)
    assert psutil.wait_procs([left], timeout=60)[1] == []


def test_a_fork_that_waits_for_a_lock_of_a_thread_is_killed() -> None:
    lock = threading.Lock()
    with lock:
        assert in_fork(lambda: int(lock.acquire()), 0.2) is None
    assert in_fork(lambda: 5, 60) == 5
    assert in_fork(lambda: 1 // 0, 60) == 98
