"""Asynchronous I/O when processes are killed, fork or end, when threads share it, and in narrow places."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from aio_files import ENGINES, content_of, make_handle, random_bytes, refusal

from acclimate.ops import AsyncIOHandle
from fresh_process import FreshProcesses, plain_environment
from quick_parameters import quick

_PREPARED = """
import os, sys, torch
from pathlib import Path
from acclimate.ops import AsyncIOHandle
path = Path({path!r})
"""


def prepared(path: Path) -> str:
    return _PREPARED.format(path=str(path))


def needs(engine: str) -> dict[str, str]:
    """The environment that chooses an engine; skips where it is refused."""
    if reason := refusal(engine):
        pytest.skip(reason)
    return {"ACCLIMATE_AIO": engine}


# -- killed ------------------------------------------------------------------------------------------


def test_a_writer_killed_in_mid_write_leaves_the_old_file_or_the_new_one(
    fresh: FreshProcesses, tmp_path: Path
) -> None:
    code = prepared(tmp_path / "x") + (
        "import random, signal, time\n"
        "size = 2 << 20\n"
        "path.write_bytes(bytes(size))\n"
        "chance = random.Random(0)\n"
        "AsyncIOHandle().close()\n"  # builds and loads, so that the children need not
        "for _ in range(2):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        contents = [torch.full((size,), value, dtype=torch.uint8) for value in (1, 2, 3)]\n"
        "        handle = AsyncIOHandle(65536, 4)\n"
        "        while True:\n"
        "            for content in contents: handle.pwrite(content, path, atomic=True)\n"
        "    before = path.stat().st_ino\n"
        "    while path.stat().st_ino == before: time.sleep(0.001)\n"  # the child is at work
        "    time.sleep(chance.uniform(0, 0.05))\n"
        "    os.kill(child, signal.SIGKILL)\n"
        "    os.waitpid(child, 0)\n"
        "    found = path.read_bytes()\n"
        "    assert len(found) == size and found.count(found[0]) == size\n"
    )
    fresh.check(code)


# -- forked ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", quick(ENGINES, "io_uring", "threads"))
def test_a_forked_child_has_an_engine_of_its_own_and_the_parent_keeps_its_requests(
    engine: str, fresh: FreshProcesses, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    code = prepared(path) + (
        "data = torch.arange(3_000_000)\n"
        "handle = AsyncIOHandle(65536, 8)\n"
        "handle.async_pwrite(data, path)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    assert handle.wait() == 0\n"
        "    handle.sync_pwrite(data[:1000], str(path) + '.child')\n"
        "    del handle\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert handle.wait() == 1\n"
        "second = os.fork()\n"
        "if second == 0:\n"
        "    handle.close()\n"  # the parent's engine, which this child has never used
        "    os._exit(0)\n"
        "assert os.waitpid(second, 0)[1] == 0\n"
        "found = torch.empty_like(data)\n"
        "handle.sync_pread(found, path)\n"
        "assert torch.equal(found, data)\n"
    )
    fresh.check(code, env=needs(engine))
    assert (tmp_path / "x.child").read_bytes() == content_of(torch.arange(1000))


# -- ended and freed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["threads", pytest.param("python", marks=pytest.mark.slow)])
def test_a_process_that_ends_finishes_what_it_asked_for(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    code = prepared(path) + (
        "handle = AsyncIOHandle(65536, 8)\n"
        "handle.async_pwrite(torch.full((10_000_001,), 7, dtype=torch.uint8), path)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**plain_environment(), **needs(engine), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert path.read_bytes() == b"\7" * 10_000_001


@pytest.mark.parametrize("engine", quick(ENGINES, "io_uring", "threads"))
def test_a_handle_freed_with_requests_on_their_way_finishes_them(engine: str, tmp_path: Path) -> None:
    expected = random_bytes(10_000_001)
    handle = make_handle(engine, block_size=65536, queue_depth=4)
    handle.async_pwrite(expected.clone(), tmp_path / "x")  # nobody else holds the tensor
    found = torch.zeros_like(expected)
    del handle
    assert (tmp_path / "x").read_bytes() == content_of(expected)
    with make_handle(engine) as handle:
        handle.async_pread(found, tmp_path / "x")
    assert torch.equal(found, expected)


# -- waiting -----------------------------------------------------------------------------------------


def slow_write(handle: AsyncIOHandle, path: Path) -> torch.Tensor:
    """Starts a write that takes a good part of a second: many small blocks, one after the other."""
    data = random_bytes(24 << 20)
    assert handle.get_block_size() == 4096
    assert handle.async_pwrite(data, path) == 0
    return data


@pytest.mark.parametrize("engine", quick(("io_uring", "aio", "threads"), "io_uring"))
def test_other_python_threads_run_while_one_waits(engine: str, tmp_path: Path) -> None:
    def turns_per_second() -> float:
        """How often another thread had its turn during a wait."""
        ticks = 0
        is_done = threading.Event()

        def tick() -> None:
            nonlocal ticks
            while not is_done.is_set():
                time.sleep(0.001)
                ticks += 1

        with make_handle(engine, block_size=4096, queue_depth=1) as handle:
            slow_write(handle, tmp_path / "x")
            thread = threading.Thread(target=tick)
            thread.start()
            start = time.perf_counter()
            handle.wait()
            took_s = time.perf_counter() - start
            is_done.set()
            thread.join()
        return (ticks - 1) / took_s

    # A wait that kept the lock would let the thread run once per 100 ms, when it looks for signals.
    # One time of five is enough: where the machine is busy, the thread waits for a processor.
    assert any(turns_per_second() > 30 for _ in range(5))


@pytest.mark.parametrize("engine", quick(("io_uring", "aio", "threads"), "threads"))
def test_ctrl_c_ends_a_wait_and_the_requests_can_be_waited_for_again(engine: str, tmp_path: Path) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def wait_to_be_interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        handle.wait()

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with make_handle(engine, block_size=4096, queue_depth=1) as handle:
            data = slow_write(handle, tmp_path / "x")
            with pytest.raises(KeyboardInterrupt):
                wait_to_be_interrupted()
            assert handle.wait() == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (tmp_path / "x").read_bytes() == content_of(data)


@pytest.mark.parametrize("engine", ENGINES)
def test_threads_share_a_handle_and_each_gets_its_own_data_and_errors(engine: str, tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        data = random_bytes(50_000 + number, seed=number)
        found = torch.empty_like(data)
        try:
            for turn in range(10):
                path = tmp_path / f"{number}-{turn}"
                handle.write(data, path)
                handle.read(found, path)
                assert torch.equal(found, data)
                with pytest.raises(FileNotFoundError):
                    handle.read(found, tmp_path / "missing")
                with pytest.raises(OSError, match="/dev/full"):
                    handle.write(data, "/dev/full")
        except BaseException as error:
            failures.append(error)

    with make_handle(engine, block_size=16384, queue_depth=4, intra_op_parallelism=2) as handle:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


# -- narrow places -----------------------------------------------------------------------------------

_ROUND_TRIP = """
import logging
logging.basicConfig()
data = torch.arange(100_001)
found = torch.empty_like(data)
with AsyncIOHandle(65536, 8) as handle:
    handle.sync_pwrite(data, path, 5)
    handle.sync_pread(found, path, 5)
    tell(engine=handle.engine)
AsyncIOHandle().close()
assert torch.equal(found, data)
"""

# Answers io_uring_setup with EPERM and io_setup with ENOSYS, as the filters of containers do.
_REFUSE = """
import ctypes, platform, struct
io_setup = {"x86_64": 206, "aarch64": 0}.get(platform.machine())
if io_setup is None:
    tell(engine="unknown machine"); os._exit(0)
def step(code, value, yes=0, no=0): return struct.pack("HBBI", code, yes, no, value)
REFUSE, ALLOW = 0x00050000, 0x7FFF0000
rules = [step(0x20, 0), step(0x15, 425, 2), step(0x15, io_setup, 2), step(0x06, ALLOW),
         step(0x06, REFUSE | 1), step(0x06, REFUSE | 38)]
code = ctypes.create_string_buffer(b"".join(rules))
program = struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(code))
prctl = ctypes.CDLL(None, use_errno=True).prctl
assert prctl(38, 1, 0, 0, 0) == 0
if prctl(22, 2, ctypes.c_char_p(program), 0, 0) != 0:
    tell(engine="no filters"); os._exit(0)
"""


def test_where_a_container_refuses_the_kernels_queues_threads_do_the_work(
    fresh: FreshProcesses, tmp_path: Path
) -> None:
    needs("threads")
    engine = fresh.check(prepared(tmp_path / "x") + _REFUSE + _ROUND_TRIP).told["engine"]
    if engine in ("unknown machine", "no filters"):
        pytest.skip(f"cannot refuse system calls here: {engine}")
    assert engine == "threads"


@pytest.mark.parametrize(("engine", "reason"), [("io_uring", "Operation not permitted"), ("aio", "Function")])
def test_a_refused_engine_that_was_chosen_by_name_fails_with_the_reason(
    engine: str, reason: str, fresh: FreshProcesses, tmp_path: Path
) -> None:
    ended = fresh.run(prepared(tmp_path / "x") + _REFUSE + _ROUND_TRIP, env=needs(engine))
    if "engine" in ended.told:
        pytest.skip(f"cannot refuse system calls here: {ended.told['engine']}")
    assert f'ACCLIMATE_AIO is "{engine}", which this machine refuses ({reason}' in ended.stderr


def test_without_a_compiler_python_threads_do_the_work_and_one_warning_says_so(
    fresh: FreshProcesses, tmp_path: Path
) -> None:
    narrow = {"PATH": str(tmp_path), "CXX": "", "ACCLIMATE_CACHE": str(tmp_path / "cache")}
    ended = fresh.check(prepared(tmp_path / "x") + _ROUND_TRIP, env=narrow)
    assert ended.told["engine"] == "python"
    assert ended.stderr.count('The op "async_io" runs on plain torch') == 1
    assert (tmp_path / "x").read_bytes()[5:] == content_of(torch.arange(100_001))


def test_a_kernels_engine_chosen_by_name_needs_the_native_library(
    fresh: FreshProcesses, tmp_path: Path
) -> None:
    narrow = {"PATH": str(tmp_path), "CXX": "", "ACCLIMATE_CACHE": str(tmp_path / "cache")}
    ended = fresh.run(prepared(tmp_path / "x") + _ROUND_TRIP, env={**narrow, "ACCLIMATE_AIO": "io_uring"})
    assert 'ACCLIMATE_AIO is "io_uring", which needs the native library of AsyncIOBuilder' in ended.stderr
