"""The engines that move bytes: the kernel's queues, through the native library, or Python threads."""

from __future__ import annotations

import _thread
import ctypes
import errno
import logging
import os
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

import torch

from acclimate.errors import InvalidEnvironmentError, excerpt
from acclimate.ops.aio.builder import load_native
from acclimate.ops.aio.files import OpenFile

logger = logging.getLogger("acclimate")

END_OF_FILE = errno.ENODATA
"""An outcome's error if the file ended before the request did, for which reads have no errno."""

_VARIABLE = "ACCLIMATE_AIO"
_NATIVE = {"io_uring": 0, "aio": 1, "threads": 2}  # numbered as in async_io.cpp, best first
_PYTHON = "python"
# A wait returns to Python this often, so that Ctrl-C and other signals can end it.
_WAIT_SLICE_MS = 100
_LARGEST_POOL = 32
_LARGEST_SETTING = 2**31 - 1  # an argument has 64 bits; the native library has lower limits of its own


@dataclass(frozen=True)
class Settings:
    """A handle's settings, under DeepSpeed's names."""

    block_size: int
    queue_depth: int
    single_submit: bool
    overlap_events: bool
    intra_op_parallelism: int


@dataclass(frozen=True)
class Outcome:
    """How a request ended."""

    error: int = 0
    """An errno, :data:`END_OF_FILE`, or 0 if all bytes were moved."""
    offset: int = 0
    """The file offset of the first byte that was not moved."""


_NEVER_SUBMITTED = Outcome(errno.ECANCELED)
"""The outcome of a request that a signal interrupted before it reached the engine."""


class NativeEngine:
    """io_uring, Linux AIO, or threads with plain calls, in the native library."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        identity = torch.ops.acclimate.aio_start(
            _NATIVE[name],
            min(settings.block_size, _LARGEST_SETTING),
            min(settings.queue_depth, _LARGEST_SETTING),
            settings.single_submit,
            min(settings.intra_op_parallelism, _LARGEST_SETTING),
        )
        if identity < 0:
            raise OSError(-identity, os.strerror(-identity))
        self._identity = identity

    def submit(self, ticket: int, memory: torch.Tensor, file: OpenFile, offset: int, writes: bool) -> None:
        """Starts to move all bytes of a contiguous host tensor, as the request with this number."""
        length = memory.numel() * memory.element_size()
        refusal = torch.ops.acclimate.aio_submit(
            self._identity, ticket, memory, length, file.fd, file.direct_fd, offset, writes
        )
        if refusal < 0:
            raise OSError(-refusal, os.strerror(-refusal))

    def wait(self, ticket: int) -> Outcome:
        """Waits for a request; until :meth:`forget`, further calls return the same outcome."""
        # torch's dispatcher releases the GIL while native code waits.
        state = 0
        while state == 0:
            state, error, offset = torch.ops.acclimate.aio_wait(self._identity, ticket, _WAIT_SLICE_MS)
        return Outcome(error, offset) if state > 0 else _NEVER_SUBMITTED

    def forget(self, ticket: int) -> None:
        """Frees the engine's record of a request that has ended."""
        torch.ops.acclimate.aio_forget(self._identity, ticket)

    def stop(self) -> None:
        """Finishes all submitted requests and frees the engine."""
        torch.ops.acclimate.aio_stop(self._identity)

    def abandon(self) -> None:
        """In a forked child: drops the parent's resources, without waiting."""
        torch.ops.acclimate.aio_abandon(self._identity)


class _Block:
    """A part of a request of :class:`PythonEngine`, moved by the first worker to take it, or canceled."""

    def __init__(self, memory: memoryview, fd: int, offset: int, writes: bool) -> None:
        self._arguments = (memory, fd, offset, writes)
        self._outcome = _NEVER_SUBMITTED
        self._is_taken = threading.Lock()
        self._is_on_its_way = threading.Lock()
        self._is_on_its_way.acquire()

    def move(self) -> None:
        if self._is_taken.acquire(blocking=False):
            self._outcome = _move(*self._arguments)
            self._is_on_its_way.release()

    def cancel(self) -> None:
        if self._is_taken.acquire(blocking=False):
            self._is_on_its_way.release()

    def wait(self) -> Outcome:
        with self._is_on_its_way:
            return self._outcome


class PythonEngine:
    """Python threads, for machines without a compiler. The methods are those of :class:`NativeEngine`.

    Ctrl-C inside ``concurrent.futures`` can leave a lock held, since its code is Python. So this class uses
    only primitives written in C: locks, ``SimpleQueue`` and bare threads.
    """

    name = _PYTHON

    def __init__(self, settings: Settings) -> None:
        self._block_bytes = settings.block_size
        self._requests: dict[int, list[_Block]] = {}
        self._queue: SimpleQueue[_Block | None] = SimpleQueue()
        self._workers = []
        for _ in range(min(_LARGEST_POOL, settings.queue_depth * settings.intra_op_parallelism)):
            is_running = threading.Lock()
            is_running.acquire()
            self._workers.append(is_running)
            _thread.start_new_thread(_work, (self._queue, is_running))

    def submit(self, ticket: int, memory: torch.Tensor, file: OpenFile, offset: int, writes: bool) -> None:
        length = memory.numel() * memory.element_size()
        view = memoryview((ctypes.c_char * length).from_address(memory.data_ptr())).cast("B")
        blocks = [
            _Block(view[start : start + self._block_bytes], file.fd, offset + start, writes)
            for start in range(0, length, self._block_bytes)
        ]
        try:
            self._requests[ticket] = blocks
            for block in blocks:
                self._queue.put(block)
        except BaseException:
            for block in blocks:
                block.cancel()
            raise

    def wait(self, ticket: int) -> Outcome:
        blocks = self._requests.get(ticket)
        if blocks is None:
            return _NEVER_SUBMITTED
        outcomes = [block.wait() for block in blocks]
        return next((outcome for outcome in outcomes if outcome.error), Outcome())

    def forget(self, ticket: int) -> None:
        self._requests.pop(ticket, None)

    def stop(self) -> None:
        for _ in self._workers:
            self._queue.put(None)
        for is_running in self._workers:
            with is_running:
                pass
        self._workers.clear()

    def abandon(self) -> None:
        self._requests.clear()


def _work(queue: SimpleQueue[_Block | None], is_running: threading.Lock) -> None:
    try:
        while (block := queue.get()) is not None:
            block.move()
    finally:
        is_running.release()


def _move(memory: memoryview, fd: int, offset: int, writes: bool) -> Outcome:
    """Moves one block by ``preadv`` and ``pwritev``, each of which may move only a part."""
    try:
        while memory:
            count = os.pwritev(fd, [memory], offset) if writes else os.preadv(fd, [memory], offset)
            if count == 0:
                return Outcome(errno.EIO if writes else END_OF_FILE, offset)
            memory, offset = memory[count:], offset + count
    except OSError as error:
        return Outcome(error.errno or errno.EIO, offset)
    except MemoryError:
        return Outcome(errno.ENOMEM, offset)
    return Outcome()


Engine: TypeAlias = NativeEngine | PythonEngine


def start_engine(settings: Settings) -> Engine:
    """Starts the engine that ``ACCLIMATE_AIO`` names, or else the best one that this machine allows.

    Raises:
        InvalidEnvironmentError: ``ACCLIMATE_AIO`` names no engine, or one that this machine refuses.
    """
    chosen = os.environ.get(_VARIABLE)
    if chosen and chosen not in (*_NATIVE, _PYTHON):
        names = ", ".join((*_NATIVE, _PYTHON))
        raise InvalidEnvironmentError(
            f'{_VARIABLE} must be one of {names}. Value "{excerpt(chosen)}" is not supported.'
        )
    if chosen == _PYTHON:
        return PythonEngine(settings)
    if not load_native():
        if chosen:
            raise InvalidEnvironmentError(
                f'{_VARIABLE} is "{chosen}", which needs the native library of AsyncIOBuilder; '
                f"`acclimate ops` says why it cannot be built here. Unset {_VARIABLE} to use Python threads."
            )
        return PythonEngine(settings)
    for name in [chosen] if chosen else list(_NATIVE):
        try:
            return NativeEngine(name, settings)
        except OSError as error:
            if chosen:
                raise InvalidEnvironmentError(
                    f'{_VARIABLE} is "{chosen}", which this machine refuses ({error.strerror}); containers '
                    f"often forbid it. Unset {_VARIABLE} to use the best engine that is allowed."
                ) from error
            logger.debug("asynchronous I/O without %s: %s", name, error.strerror)
    return PythonEngine(settings)
