"""Many threads on one handle for a while: sizes, engines, errors, forks and Ctrl-C mixed by a fixed seed."""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from aio_files import ENGINES, make_handle, random_bytes, refusal

import acclimate.ops.aio
from acclimate.errors import AsyncIOError
from acclimate.ops import AsyncIOHandle
from fresh_process import FreshProcesses

pytestmark = pytest.mark.slow

THREADS = 8
TURNS = 150


class Worker(threading.Thread):
    """One thread with files of its own, which checks each result, count and error."""

    def __init__(self, handle: AsyncIOHandle, folder: Path, seed: int) -> None:
        super().__init__()
        self._handle = handle
        self._path = folder / f"{seed}.bin"
        self._chance = random.Random(seed)
        self._data = random_bytes(600_000, seed)
        self.wrong: list[str] = []

    def run(self) -> None:
        self._handle.write(self._data, self._path)
        for turn in range(TURNS):
            action = self._chance.choice(
                [self._read, self._read_some, self._fail, self._fail_among, self._write]
            )
            try:
                action()
            except BaseException as error:
                self.wrong.append(f"{self._path.name}, turn {turn}, {action.__name__}: {error!r}")

    def _part(self) -> tuple[int, torch.Tensor]:
        start = self._chance.choice([0, 4096, self._chance.randrange(300_000)])
        size = self._chance.choice([1, 511, 4096, 65536, self._chance.randrange(1, 300_000)])
        return start, self._data[start : start + size]

    def _read(self) -> None:
        start, expected = self._part()
        found = torch.zeros_like(expected)
        assert self._handle.sync_pread(found, self._path, start) == 1
        assert torch.equal(found, expected)

    def _read_some(self) -> None:
        parts = [self._part() for _ in range(self._chance.randrange(1, 9))]
        founds = [torch.zeros_like(expected) for _, expected in parts]
        for (start, _), found in zip(parts, founds, strict=True):
            assert self._handle.async_pread(found, self._path, start) == 0
        assert self._handle.wait() == len(parts)
        assert all(torch.equal(found, part) for found, (_, part) in zip(founds, parts, strict=True))

    def _write(self) -> None:
        start, part = self._part()
        is_atomic = self._chance.random() < 0.2
        if is_atomic:
            assert self._handle.pwrite(self._data, self._path, True, atomic=True) == 1
        else:
            assert self._handle.sync_pwrite(part, self._path, start) == 1

    def _fail(self) -> None:
        with pytest.raises(AsyncIOError, match="/dev/full") as caught:
            self._handle.write(self._part()[1], "/dev/full")
        assert len(caught.value.errors) == 1

    def _fail_among(self) -> None:
        start, expected = self._part()
        found = torch.zeros_like(expected)
        self._handle.async_pread(found, self._path, start)
        self._handle.async_pwrite(self._data[:5000], "/dev/full", self._path.stat().st_ino)
        with pytest.raises(AsyncIOError, match="/dev/full") as caught:
            self._handle.wait()
        assert len(caught.value.errors) == 1
        assert torch.equal(found, expected)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("workers", [1, 3])
def test_threads_that_do_everything_at_once_never_see_each_others_data_or_errors(
    engine: str, workers: int, tmp_path: Path
) -> None:
    with make_handle(engine, block_size=16384, queue_depth=4, intra_op_parallelism=workers) as handle:
        threads = [Worker(handle, tmp_path, seed) for seed in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [wrong for thread in threads for wrong in thread.wrong] == []
        assert handle.wait() == 0


_SIGNALS_AND_FORKS = """
import os, random, signal, threading, time, torch
from acclimate.ops import AsyncIOHandle
torch.set_num_threads(1)  # a child of a process that has used libgomp's threads hangs in them
folder = {folder!r}
handle, stop, wrong, chance = AsyncIOHandle(16384, 4), threading.Event(), [], random.Random(0)
data = torch.arange(100_000)
def work(name):
    while not stop.is_set():
        found = torch.zeros_like(data)
        handle.sync_pwrite(data, f"{{folder}}/{{name}}")
        handle.sync_pread(found, f"{{folder}}/{{name}}")
        if not torch.equal(found, data): wrong.append(name)
assert torch.equal(torch.zeros_like(data), data * 0)  # torch initialises its kernels before a fork
threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
for thread in threads: thread.start()
def interrupt(number, frame): raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
interrupted = 0
handle.sync_pwrite(data, f"{{folder}}/main")
for turn in range(200):
    found = torch.zeros_like(data)
    signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0001, 0.004))
    try:
        while True:
            handle.async_pwrite(data, f"{{folder}}/main")
            handle.wait()
    except KeyboardInterrupt:
        interrupted += 1
    while True:  # an interrupted request is told of once, as done or as canceled
        try:
            handle.wait()
        except OSError as error:
            if "Operation canceled" not in str(error): raise
        if handle.wait() == 0: break
    handle.sync_pread(found, f"{{folder}}/main")
    if not torch.equal(found, data): wrong.append("main")
    if turn % 30 == 0:
        child = os.fork()
        if child == 0:
            found = torch.zeros_like(data)
            handle.sync_pread(found, f"{{folder}}/main")
            os._exit(not torch.equal(found, data))
        if os.waitpid(child, 0)[1] != 0: wrong.append("child")
stop.set()
for thread in threads: thread.join()
signal.signal(signal.SIGALRM, signal.SIG_DFL)
handle.close()
tell(wrong=wrong, interrupted=interrupted, descriptors=len(os.listdir("/proc/self/fd")))
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_ctrl_c_and_forks_at_any_moment_lose_no_data(
    engine: str, fresh: FreshProcesses, tmp_path: Path
) -> None:
    if reason := refusal(engine):
        pytest.skip(reason)
    told = fresh.check(
        _SIGNALS_AND_FORKS.format(folder=str(tmp_path)), env={"ACCLIMATE_AIO": engine}, timeout_s=100
    ).told
    assert told["wrong"] == []
    assert told["interrupted"] == 200
    assert told["descriptors"] < 40


@pytest.mark.parametrize("way", [0, 1, 2], ids=["io_uring", "aio", "threads"])
def test_thread_sanitizer_finds_no_race_in_the_native_queue(way: int, tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on PATH")
    assert acclimate.ops.aio.__file__
    headers = Path(acclimate.ops.aio.__file__).parent / "csrc"
    source, program = Path(__file__).parent / "data" / "aio_stress.cpp", tmp_path / "stress"
    built = subprocess.run(
        [compiler, "-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread", "-I", headers, source,
         "-o", program],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if built.returncode != 0 and "tsan" in built.stderr:
        pytest.skip("no ThreadSanitizer here")
    assert built.returncode == 0, built.stderr
    ended = subprocess.run([program, tmp_path, str(way)], capture_output=True, text=True, check=False)
    if ended.returncode == 2 or "unexpected memory mapping" in ended.stderr:
        pytest.skip("this machine refuses the engine or the sanitizer")
    assert ended.returncode == 0, ended.stdout + ended.stderr
