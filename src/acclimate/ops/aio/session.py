"""The transfers of one handle in one process: which are pending, how they ended, and who reports them."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from acclimate.errors import AsyncIOError
from acclimate.ops.aio import failures
from acclimate.ops.aio.buffers import Buffer
from acclimate.ops.aio.engines import Engine, Outcome, Settings, start_engine
from acclimate.ops.aio.files import Name, OpenFile, Replacement, open_for_validation

logger = logging.getLogger("acclimate")

_VALIDATION_BYTES = 1 << 24
_NO_BUFFER = Buffer(torch.empty(0), torch.empty(0))


@dataclass(eq=False)
class Transfer:
    """One read or write, which keeps its tensor and its file alive until it has ended."""

    buffer: Buffer
    file: OpenFile
    offset: int
    writes: bool
    validates: bool
    replacement: Replacement | None
    owner: threading.Thread = field(default_factory=threading.current_thread)
    """The thread that submitted it."""
    call: object | None = None
    """Identifies the call that waits for it and will report it; guarded by the session's lock."""
    ticket: int = 0
    error: AsyncIOError | None = None
    """Its error, once it has failed."""
    has_ended: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)
    is_busy: bool = False
    """Whether the thread that holds the lock is starting or finishing it."""
    is_finished: bool = False

    @property
    def name(self) -> Name:
        """The file, as the caller gave it."""
        return self.file.name

    def reports_to(self, thread: threading.Thread) -> bool:
        """Whether a thread that waits for all requests reports this one.

        It also reports requests of threads that have ended, and of threads that Python did not start: hooks
        of autograd run in such threads, which never wait.
        """
        owner = self.owner
        return owner is thread or not owner.is_alive() or isinstance(owner, threading._DummyThread)

    def end(self, engine: Engine) -> None:
        """Waits for the bytes and finishes the transfer; the first of several threads does so.

        Can be called again after a Ctrl-C. Does nothing in a signal handler that interrupted this thread
        while it was starting or finishing the transfer: the interrupted code continues afterwards.
        """
        with self.lock:
            if self.is_busy:
                return
            try:
                self.is_busy = True
                if not self.is_finished:
                    outcome = engine.wait(self.ticket)
                    try:
                        self._finish(outcome)
                    except AsyncIOError as error:
                        self.error = error
                    self.is_finished = True
                if not self.has_ended:
                    engine.forget(self.ticket)
                    self.discard()
                    self.buffer = _NO_BUFFER
                    self.has_ended = True
            finally:
                self.is_busy = False

    def _finish(self, outcome: Outcome) -> None:
        """Validates a write, publishes a replacement, delivers a read."""
        length = self.buffer.length
        if outcome.error:
            raise failures.failed_transfer(self.name, outcome, self.offset, length, self.writes)
        try:
            if self.validates:
                self._validate()
            if self.replacement is not None:
                self.replacement.publish()
            if not self.writes:
                self.buffer.deliver()
        except AsyncIOError:
            raise
        except OSError as error:
            raise failures.failed_call(self.name, error, self.offset, length, self.writes) from error
        except (RuntimeError, MemoryError) as error:  # torch's, from a device
            reason = OSError(errno.EIO, f"The bytes could not be copied into the tensor: {error}")
            raise failures.failed_call(self.name, reason, self.offset, length, self.writes) from error

    def discard(self) -> None:
        """Closes the file and removes an unpublished replacement."""
        if self.replacement is not None:
            self.replacement.discard()
        self.file.close()

    def _validate(self) -> None:
        """Reads the file again, through the page cache, and compares."""
        memory = self.buffer.memory.reshape(-1).view(torch.uint8)
        fd = open_for_validation(self.file)
        try:
            for start in range(0, self.buffer.length, _VALIDATION_BYTES):
                part = memory[start : start + _VALIDATION_BYTES]
                content = os.pread(fd, len(part), self.offset + start)
                if len(content) < len(part):
                    raise failures.differing_data(self.name, self.offset + start + len(content))
                found = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                if not torch.equal(found, part):
                    first = int((found != part).nonzero()[0])
                    raise failures.differing_data(self.name, self.offset + start + first)
        finally:
            os.close(fd)


class Session:
    """An engine and its transfers that have not been reported yet.

    Any thread may start and wait. Each transfer is reported once, as an error or in a count: to the thread
    that submitted it (:meth:`Transfer.reports_to`), to :meth:`close`, or to the log. Locks are re-entrant,
    since a signal handler may interrupt a call and make another.

    Belongs to one process: a forked child has the parent's memory but none of its threads.
    """

    def __init__(self, settings: Settings) -> None:
        self.process = os.getpid()
        self.engine: Engine = start_engine(settings)
        self._tickets = itertools.count(1)
        self._pending: dict[int, Transfer] = {}
        self._is_closed = False
        self._lock = threading.RLock()

    def start(self, transfer: Transfer) -> None:
        """Records a transfer and submits it to the engine.

        Raises:
            ClosedHandleError: the handle was closed meanwhile.
            OSError: the engine refused it.
        """
        with transfer.lock:  # other threads cannot wait for it before it is submitted
            try:
                transfer.is_busy = True
                self._submit(transfer)
            finally:
                transfer.is_busy = False

    def _submit(self, transfer: Transfer) -> None:
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                # Recorded first, so that a Ctrl-C does not lose a transfer that the kernel may have started.
                transfer.ticket = next(self._tickets)
                self._pending[transfer.ticket] = transfer
        if is_closed:
            transfer.discard()
            raise failures.closed_handle(transfer.name)
        memory, file = transfer.buffer.memory, transfer.file
        try:
            self.engine.submit(transfer.ticket, memory, file, transfer.offset, transfer.writes)
        except Exception:
            self.engine.wait(transfer.ticket)  # some blocks may have been submitted
            with self._lock:
                del self._pending[transfer.ticket]
            transfer.has_ended = transfer.is_finished = True
            self.engine.forget(transfer.ticket)
            transfer.discard()
            raise

    def run(self, transfer: Transfer, *, finishes_own: bool) -> int:
        """Starts a transfer, waits for it and returns 1.

        With ``finishes_own``, also waits for the calling thread's earlier transfers, and returns their number
        plus one.
        """
        call = object()
        try:
            transfer.call = call  # set before it starts, so that no other call reports it
            self.start(transfer)
            own = self._own() if finishes_own else [transfer]
            return self._finish(own, own, call)
        except BaseException:  # Ctrl-C: it continues, and the next wait() reports it
            transfer.call = None
            raise

    def _own(self) -> list[Transfer]:
        thread = threading.current_thread()
        with self._lock:
            every = list(self._pending.values())
        return [transfer for transfer in every if transfer.owner is thread]

    def wait(self) -> int:
        """Waits for all transfers of all threads and reports the calling thread's."""
        thread = threading.current_thread()
        with self._lock:
            every = list(self._pending.values())
        reported = [transfer for transfer in every if transfer.reports_to(thread)]
        return self._finish(every, reported, object())

    def close(self) -> None:
        """Accepts no more transfers, waits for the pending ones and stops the engine. Can be called again.

        Raises:
            AsyncIOError: transfers failed for which no other call is waiting.
        """
        if self.process != os.getpid():
            self.abandon()
            return
        with self._lock:
            self._is_closed = True
            every = list(self._pending.values())
        try:
            self._finish(every, every, object())
        finally:
            if all(transfer.has_ended for transfer in every):
                self.engine.stop()

    def _finish(self, awaited: Iterable[Transfer], reported: Iterable[Transfer], call: object) -> int:
        """Waits for transfers, and reports those of ``reported`` that no other call reports."""
        with self._lock:
            claimed = [transfer for transfer in reported if transfer.call in (None, call)]
            for transfer in claimed:
                transfer.call = call
        try:
            for transfer in awaited:
                transfer.end(self.engine)
        except BaseException:  # Ctrl-C: they continue, and another call can wait for them
            for transfer in claimed:
                transfer.call = None
            raise
        with self._lock:
            ended = [t for t in claimed if t.has_ended and self._pending.pop(t.ticket, None) is not None]
            for transfer in claimed:
                if not transfer.has_ended:  # the call that a signal handler interrupted will end it
                    transfer.call = None
        errors = [transfer.error for transfer in ended if transfer.error is not None]
        if errors:
            raise failures.together(errors)
        return len(ended)

    def abandon(self) -> None:
        """Leaves the engine and its transfers to the parent, in a forked child."""
        pending, self._pending = self._pending, {}
        self._lock = threading.RLock()  # another thread of the parent may have held it during the fork
        for transfer in pending.values():
            # Not discard(): the parent still needs its temporary file.
            transfer.file.close()
        self.engine.abandon()

    def release(self) -> None:
        """Closes a handle that is garbage collected, and logs errors instead of raising them."""
        if self._pending and self.process == os.getpid():
            logger.warning(
                "An AsyncIOHandle was freed before wait() was called for %d requests.", len(self._pending)
            )
        try:
            self.close()
        except AsyncIOError as error:
            logger.error("Asynchronous I/O failed, and wait() was not called for it: %s", error)
