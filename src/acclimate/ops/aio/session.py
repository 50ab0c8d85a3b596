"""The transfers of one handle in one process: what is on its way, how each ended, and who reports it."""

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
    """One read or write. It keeps the tensor and the file alive until it has ended."""

    buffer: Buffer
    file: OpenFile
    offset: int
    writes: bool
    validates: bool
    replacement: Replacement | None
    owner: threading.Thread = field(default_factory=threading.current_thread)
    """The thread that submitted it."""
    call: object | None = None
    """Stands for the call that waits for it and will report it; changes under the session's lock."""
    ticket: int = 0
    error: AsyncIOError | None = None
    """How it failed, once it has ended."""
    has_ended: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)
    is_busy: bool = False
    """Whether the thread that holds the lock is starting or ending it."""
    is_finished: bool = False

    @property
    def name(self) -> Name:
        """The file's, as the caller gave it."""
        return self.file.name

    def reports_to(self, thread: threading.Thread) -> bool:
        """Whether a thread that waits for all requests reports this one.

        It does so also for a thread that can no longer wait, and for one that Python did not start: hooks of
        autograd run in such threads, which know nothing of the handle afterwards.
        """
        owner = self.owner
        return owner is thread or not owner.is_alive() or isinstance(owner, threading._DummyThread)

    def end(self, engine: Engine) -> None:
        """Waits for the bytes, then does what comes after them, whichever thread calls it first.

        After a Ctrl-C it can be called again. In a handler of a signal that came while this very thread was
        starting or ending it, it does nothing: what the handler has interrupted goes on after it.
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
        """Validates what was written, publishes what replaces a file, delivers what was read."""
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
            reason = OSError(errno.EIO, f"The bytes did not get into the tensor: {error}")
            raise failures.failed_call(self.name, reason, self.offset, length, self.writes) from error

    def discard(self) -> None:
        """Closes the files; what would have replaced one goes away."""
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
    """An engine, and the transfers it was given whose end has not been reported yet.

    Any thread may start and wait. A transfer is reported once: its error, or its place in a count, goes to
    the thread that submitted it (:meth:`Transfer.reports_to`), to :meth:`close`, or to nobody but the log.
    Locks are re-entrant, as a signal's handler may call in the middle of another call of its thread.

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
        """Hands a transfer to the engine and remembers it.

        Raises:
            ClosedHandleError: the handle was closed meanwhile.
            OSError: the engine refused it.
        """
        with transfer.lock:  # nobody waits for it before it is submitted
            try:
                transfer.is_busy = True
                self._submit(transfer)
            finally:
                transfer.is_busy = False

    def _submit(self, transfer: Transfer) -> None:
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                # First, so that a Ctrl-C from here on does not lose what the kernel may be moving.
                transfer.ticket = next(self._tickets)
                self._pending[transfer.ticket] = transfer
        if is_closed:
            transfer.discard()
            raise failures.closed_handle(transfer.name)
        memory, file = transfer.buffer.memory, transfer.file
        try:
            self.engine.submit(transfer.ticket, memory, file, transfer.offset, transfer.writes)
        except Exception:
            self.engine.wait(transfer.ticket)  # a part of it may be on its way
            with self._lock:
                del self._pending[transfer.ticket]
            transfer.has_ended = transfer.is_finished = True
            self.engine.forget(transfer.ticket)
            transfer.discard()
            raise

    def run(self, transfer: Transfer, *, finishes_own: bool) -> int:
        """Starts a transfer and waits for it; returns 1.

        With ``finishes_own`` it also waits for the calling thread's earlier ones, and returns how many.

        Raises:
            ClosedHandleError: the handle was closed meanwhile.
            OSError: the engine refused it.
            AsyncIOError: of each transfer that failed. The others have ended well.
        """
        call = object()
        try:
            transfer.call = call  # before it starts, so that no other call reports it
            self.start(transfer)
            own = self._own() if finishes_own else [transfer]
            return self._finish(own, own, call)
        except BaseException:  # Ctrl-C: it goes on, and the next wait() reports it
            transfer.call = None
            raise

    def _own(self) -> list[Transfer]:
        thread = threading.current_thread()
        with self._lock:
            every = list(self._pending.values())
        return [transfer for transfer in every if transfer.owner is thread]

    def wait(self) -> int:
        """Waits for all transfers of all threads; reports those that concern the calling one.

        Raises:
            AsyncIOError: of each of these that failed.
        """
        thread = threading.current_thread()
        with self._lock:
            every = list(self._pending.values())
        reported = [transfer for transfer in every if transfer.reports_to(thread)]
        return self._finish(every, reported, object())

    def close(self) -> None:
        """Takes no more transfers, waits for those there are and ends the engine. Can be called again.

        Raises:
            AsyncIOError: of each transfer that failed and that no other call is waiting for.
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
        """Waits for some transfers, and reports some of them: those that no other call reports."""
        with self._lock:
            claimed = [transfer for transfer in reported if transfer.call in (None, call)]
            for transfer in claimed:
                transfer.call = call
        try:
            for transfer in awaited:
                transfer.end(self.engine)
        except BaseException:  # Ctrl-C: they go on, and can be waited for again
            for transfer in claimed:
                transfer.call = None
            raise
        with self._lock:
            ended = [t for t in claimed if t.has_ended and self._pending.pop(t.ticket, None) is not None]
            for transfer in claimed:
                if not transfer.has_ended:  # the call that a signal's handler interrupted ends it
                    transfer.call = None
        errors = [transfer.error for transfer in ended if transfer.error is not None]
        if errors:
            raise failures.together(errors)
        return len(ended)

    def abandon(self) -> None:
        """In a forked child: leaves the engine and its transfers to the parent."""
        pending, self._pending = self._pending, {}
        self._lock = threading.RLock()  # another thread of the parent may have held it during the fork
        for transfer in pending.values():
            # Not discard(): removing a half-written file is the parent's business.
            transfer.file.close()
        self.engine.abandon()

    def release(self) -> None:
        """As :meth:`close`, for a handle that nobody can be told the errors of."""
        if self._pending and self.process == os.getpid():
            logger.warning(
                "An AsyncIOHandle is freed with %d requests that were not waited for.", len(self._pending)
            )
        try:
            self.close()
        except AsyncIOError as error:
            logger.error("Asynchronous I/O that was not waited for failed: %s", error)
