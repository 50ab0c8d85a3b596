"""Threads that share a handle: each waits for its own requests, and reads the errors of no other."""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aio_files import ENGINES, content_of, make_handle, random_bytes

from acclimate.errors import AsyncIOError, AsyncIOFileNotFoundError, ClosedHandleError
from acclimate.ops import AsyncIOHandle
from fresh_process import FreshProcesses

LIMIT_S = 60


class HeldEngine:
    """An engine whose waits for a file end when the test releases it, so that tests choose the order."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._gates: dict[int, threading.Event] = {}
        self.held: set[str] = set()
        self._submitted = threading.Condition()
        self.names: list[str] = []
        self.released: dict[str, threading.Event] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def hold(self, path: Path) -> None:
        self.released[str(path)] = threading.Event()

    def release(self, path: Path) -> None:
        self.released[str(path)].set()

    def submit(self, ticket: int, memory: torch.Tensor, file: Any, *rest: Any) -> None:
        if gate := self.released.get(str(file.name)):
            self._gates[ticket] = gate
        self._engine.submit(ticket, memory, file, *rest)
        with self._submitted:
            self.names.append(str(file.name))
            self._submitted.notify_all()

    def await_submission(self, path: Path) -> None:
        with self._submitted:
            assert self._submitted.wait_for(lambda: str(path) in self.names, LIMIT_S)

    def wait(self, ticket: int) -> Any:
        if gate := self._gates.get(ticket):
            assert gate.wait(LIMIT_S)
        return self._engine.wait(ticket)


class Call:
    """A function that runs in a thread of its own; its result or error is there after `end`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function, *arguments), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            self.result = function(*arguments)
        except BaseException as error:
            self.error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> Any:
        self._thread.join(LIMIT_S)
        assert not self.is_running
        if self.error:
            raise self.error
        return self.result


@pytest.fixture
def handle() -> Iterator[AsyncIOHandle]:
    with make_handle("python") as handle:
        handle._session.engine = HeldEngine(handle._session.engine)
        yield handle


@pytest.fixture
def engine(handle: AsyncIOHandle) -> HeldEngine:
    engine = handle._session.engine
    assert isinstance(engine, HeldEngine)
    return engine


def written(path: Path, seed: int, count: int = 10_000) -> torch.Tensor:
    data = random_bytes(count, seed)
    path.write_bytes(content_of(data))
    return data


# -- each its own ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENGINES)
def test_no_synchronous_call_returns_before_its_data_is_there(name: str, tmp_path: Path) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        data = written(tmp_path / str(number), number, 200_000)
        for turn in range(40):
            found = torch.zeros_like(data)
            count = handle.sync_pread(found, tmp_path / str(number))
            if count != 1 or not torch.equal(found, data):
                wrong.append(f"thread {number}, turn {turn}: {count}")

    with make_handle(name, block_size=65536, queue_depth=8) as handle:
        for call in [Call(work, number) for number in range(4)]:
            call.end()
    assert wrong == []


def test_a_synchronous_call_does_not_wait_for_another_threads_request(
    handle: AsyncIOHandle, engine: HeldEngine, tmp_path: Path
) -> None:
    slow, quick = written(tmp_path / "slow", 1), written(tmp_path / "quick", 2)
    engine.hold(tmp_path / "slow")
    found_slow, found_quick = torch.zeros_like(slow), torch.zeros_like(quick)

    def read_slowly() -> int:
        handle.async_pread(found_slow, tmp_path / "slow")
        return handle.wait()

    reader = Call(read_slowly)
    engine.await_submission(tmp_path / "slow")
    assert Call(handle.sync_pread, found_quick, tmp_path / "quick").end() == 1
    assert torch.equal(found_quick, quick)
    assert reader.is_running
    engine.release(tmp_path / "slow")
    assert reader.end() == 1
    assert torch.equal(found_slow, slow)


def test_wait_waits_for_the_requests_of_all_threads_and_counts_its_own(
    handle: AsyncIOHandle, engine: HeldEngine, tmp_path: Path
) -> None:
    data = written(tmp_path / "x", 1)
    found = torch.zeros_like(data)
    engine.hold(tmp_path / "x")
    may_wait = threading.Event()

    def read() -> int:
        handle.async_pread(found, tmp_path / "x")
        assert may_wait.wait(LIMIT_S)
        return handle.wait()

    reader = Call(read)
    engine.await_submission(tmp_path / "x")
    other = Call(handle.wait)
    other._thread.join(0.05)
    assert other.is_running
    engine.release(tmp_path / "x")
    assert other.end() == 0
    assert torch.equal(found, data)  # whoever was handed the tensor may use it now
    may_wait.set()
    assert reader.end() == 1


def test_an_error_is_raised_in_the_thread_whose_request_failed_and_nowhere_else(
    handle: AsyncIOHandle, engine: HeldEngine, tmp_path: Path
) -> None:
    written(tmp_path / "x", 1)
    may_wait = threading.Event()

    def fail() -> int:
        handle.async_pwrite(random_bytes(5000), "/dev/full")
        assert may_wait.wait(LIMIT_S)
        return handle.wait()

    failing = Call(fail)
    engine.await_submission(Path("/dev/full"))
    for call in (handle.wait, lambda: handle.sync_pread(torch.zeros(9), tmp_path / "x") - 1):
        assert Call(call).end() == 0
        assert call() == 0
    may_wait.set()
    with pytest.raises(AsyncIOError, match="/dev/full"):
        failing.end()
    assert handle.wait() == 0


@pytest.mark.parametrize("starts", [threading.Thread, _thread], ids=["ended", "not started by Python"])
def test_what_no_thread_can_wait_for_any_more_counts_for_the_next_that_waits(
    handle: AsyncIOHandle, starts: Any, tmp_path: Path
) -> None:
    data = written(tmp_path / "x", 1)
    found = torch.zeros_like(data)
    is_done = threading.Event()

    def submit() -> None:
        handle.async_pread(found, tmp_path / "x")
        handle.async_pwrite(random_bytes(5000), "/dev/full")
        is_done.set()

    if starts is _thread:
        _thread.start_new_thread(submit, ())
    else:
        thread = threading.Thread(target=submit)
        thread.start()
        thread.join()
    assert is_done.wait(LIMIT_S)
    assert handle.sync_pread(torch.zeros(9), tmp_path / "x") == 1
    with pytest.raises(AsyncIOError, match="/dev/full"):
        handle.wait()
    assert torch.equal(found, data)
    assert handle.wait() == 0


def test_a_tensor_is_let_go_of_when_its_transfer_has_ended_though_its_thread_never_waits(
    handle: AsyncIOHandle, tmp_path: Path
) -> None:
    import weakref

    tensor = random_bytes(5000)
    gone = weakref.ref(tensor)
    may_end = threading.Event()
    started = threading.Event()

    def submit() -> None:
        nonlocal tensor
        handle.async_pwrite(tensor, tmp_path / "x")
        del tensor
        started.set()
        may_end.wait(LIMIT_S)

    call = Call(submit)
    assert started.wait(LIMIT_S)
    handle.wait()
    assert gone() is None
    may_end.set()
    call.end()


# -- closing -----------------------------------------------------------------------------------------


def test_close_lets_other_threads_calls_end_and_refuses_new_ones(
    handle: AsyncIOHandle, engine: HeldEngine, tmp_path: Path
) -> None:
    data = written(tmp_path / "x", 1)
    engine.hold(tmp_path / "x")
    found = torch.zeros_like(data)
    reader = Call(handle.sync_pread, found, tmp_path / "x")
    engine.await_submission(tmp_path / "x")
    closer = Call(handle.close)
    while not handle._session._is_closed:
        assert closer.is_running
    with pytest.raises(ClosedHandleError):
        handle.sync_pread(torch.zeros(9), tmp_path / "x")
    assert closer.is_running
    engine.release(tmp_path / "x")
    closer.end()
    assert reader.end() == 1
    assert torch.equal(found, data)


def test_close_raises_what_nobody_waits_for_and_leaves_the_rest_to_who_does(
    handle: AsyncIOHandle, engine: HeldEngine, tmp_path: Path
) -> None:
    engine.hold(Path("/dev/full"))
    caller = Call(handle.sync_pwrite, random_bytes(5000), "/dev/full")
    engine.await_submission(Path("/dev/full"))
    empty = tmp_path / "empty"
    empty.touch()
    unnoticed = Call(handle.async_pread, random_bytes(5000), empty)
    unnoticed.end()
    closer = Call(handle.close)
    engine.release(Path("/dev/full"))
    with pytest.raises(AsyncIOError) as caught:
        closer.end()
    assert [error.filename for error in caught.value.errors] == [str(empty)]
    with pytest.raises(AsyncIOError, match="/dev/full"):
        caller.end()


# -- Ctrl-C ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "after"])
def test_ctrl_c_while_a_request_is_submitted_loses_nothing(
    handle: AsyncIOHandle, engine: HeldEngine, tmp_path: Path, moment: str
) -> None:
    data = random_bytes(10_000)
    submit = engine._engine.submit

    def interrupted(*arguments: Any) -> None:
        if moment == "after":
            submit(*arguments)
        raise KeyboardInterrupt

    engine._engine.submit = interrupted
    with pytest.raises(KeyboardInterrupt):
        handle.async_pwrite(data, tmp_path / "x")
    engine._engine.submit = submit
    if moment == "after":
        assert handle.wait() == 1
        assert (tmp_path / "x").read_bytes() == content_of(data)
    else:
        with pytest.raises(AsyncIOError, match="Operation canceled"):
            handle.wait()
    assert handle.wait() == 0


@pytest.mark.parametrize("step", ["fsync", "link", "replace"])
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
def test_ctrl_c_while_new_content_is_published_can_be_waited_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, is_done: bool
) -> None:
    (tmp_path / "x").write_bytes(b"old")
    data = random_bytes(10_000)
    call = getattr(os, step)

    def interrupted(*arguments: Any, **options: Any) -> None:
        if is_done:
            call(*arguments, **options)
        raise KeyboardInterrupt

    with AsyncIOHandle() as handle:
        handle.pwrite(data, tmp_path / "x", True, True, atomic=True)
        monkeypatch.setattr(os, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
        monkeypatch.undo()
        assert handle.wait() == 1
    assert (tmp_path / "x").read_bytes() == content_of(data)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_handle_whose_close_was_interrupted_can_be_closed(
    handle: AsyncIOHandle, engine: HeldEngine, tmp_path: Path
) -> None:
    wait = engine._engine.wait

    def interrupted(ticket: int) -> None:
        raise KeyboardInterrupt

    handle.async_pwrite(random_bytes(5000), tmp_path / "x")
    engine._engine.wait = interrupted
    with pytest.raises(KeyboardInterrupt):
        handle.close()
    engine._engine.wait = wait
    handle.close()
    assert (tmp_path / "x").stat().st_size == 5000


# -- the first of a process --------------------------------------------------------------------------

_FIRST = """
import os, threading, torch
from acclimate.ops import {names}
barrier, errors = threading.Barrier(8), []
def make(number):
    barrier.wait()
    try:
        {make}
    except BaseException as error:
        errors.append(repr(error))
threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
tell(errors=errors)
"""


@pytest.mark.parametrize(
    ("names", "make"),
    [
        ("AsyncIOHandle", "AsyncIOHandle(queue_depth=1).close()"),
        (
            "CPUAdagrad, CPUAdam, CPULion, FusedLamb",
            "(CPUAdagrad, CPUAdam, CPULion, FusedLamb)[number % 4]([torch.zeros(3)])",
        ),
    ],
    ids=["handles", "optimizers"],
)
def test_eight_threads_can_make_the_first_of_a_process(names: str, make: str, fresh: FreshProcesses) -> None:
    for _ in range(2):
        assert fresh.check(_FIRST.format(names=names, make=make)).told["errors"] == []


def test_an_op_is_defined_once_though_many_threads_ask_at_once() -> None:
    from acclimate.ops.registry import define_in_place

    barrier = threading.Barrier(8)

    def define() -> Any:
        barrier.wait()
        return define_in_place("threads_share_(Tensor(a!) x) -> ()", lambda x: None)

    found = {call.end() for call in [Call(define) for _ in range(8)]}
    assert len(found) == 1


# -- a fork among threads ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["io_uring", "threads"])
def test_a_child_of_a_process_whose_threads_transfer_can_use_the_handle_from_threads(
    name: str, fresh: FreshProcesses, tmp_path: Path
) -> None:
    make_handle(name).close()  # skips where the engine is refused
    code = (
        "import os, threading, torch\n"
        "from acclimate.ops import AsyncIOHandle\n"
        "torch.set_num_threads(1)\n"  # a child of a process that has used libgomp's threads hangs in them
        f"folder = {str(tmp_path)!r}\n"
        "handle, stop, wrong = AsyncIOHandle(65536, 8), threading.Event(), []\n"
        "def work(name, turns):\n"
        "    data = torch.arange(50_000)\n"
        "    for turn in range(turns):\n"
        "        if stop.is_set(): return\n"
        "        found = torch.zeros_like(data)\n"
        "        handle.sync_pwrite(data, f'{folder}/{name}')\n"
        "        handle.sync_pread(found, f'{folder}/{name}')\n"
        "        if not torch.equal(found, data): wrong.append(name)\n"
        "def run(names, turns):\n"
        "    threads = [threading.Thread(target=work, args=(name, turns)) for name in names]\n"
        "    for thread in threads: thread.start()\n"
        "    return threads\n"
        "work('first', 1)\n"  # torch initialises its kernels, for ever in a child of a fork meanwhile
        "threads = run('ab', 10**9)\n"
        "for number in range(4):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        for thread in run([f'{number}c', f'{number}d'], 3): thread.join()\n"
        "        os._exit(len(wrong))\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "stop.set()\n"
        "for thread in threads: thread.join()\n"
        "assert wrong == []\n"
    )
    fresh.check(code, env={"ACCLIMATE_AIO": name})


def test_a_missing_file_is_reported_at_once_to_the_thread_that_asked(
    handle: AsyncIOHandle, tmp_path: Path
) -> None:
    with pytest.raises(AsyncIOFileNotFoundError):
        Call(handle.async_pread, torch.zeros(9), tmp_path / "missing").end()
    assert handle.wait() == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_signal_handler_uses_the_handle_that_its_thread_waits_on(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = make_handle(engine)
    content = random_bytes(5000)
    interrupted, checkpoint = tmp_path / "interrupted", tmp_path / "checkpoint"
    interrupted.write_bytes(content_of(content))
    wait = handle._session.engine.wait
    handled: list[Any] = []

    def saves(_signal: int, _frame: Any) -> None:
        handled.append(handle.sync_pwrite(content, checkpoint))
        handled.append(checkpoint.read_bytes() == content_of(content))

    def interrupted_wait(ticket: int) -> Any:
        if not handled:
            handled.append("interrupted")
            signal.raise_signal(signal.SIGUSR1)  # its handler runs in here, as between two slices of a wait
        return wait(ticket)

    monkeypatch.setattr(handle._session.engine, "wait", interrupted_wait)
    before = signal.signal(signal.SIGUSR1, saves)
    try:
        handle.async_pread(early := torch.zeros(5000, dtype=torch.uint8), interrupted)
        assert handle.sync_pread(found := torch.zeros(5000, dtype=torch.uint8), interrupted) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handled == ["interrupted", 1, True]
    assert torch.equal(found, content)
    assert torch.equal(early, content)
    assert handle.wait() == 0
    handle.close()
