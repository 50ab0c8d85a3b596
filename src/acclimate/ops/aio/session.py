"""The transfers of one handle in one process: what is on its way, and how each ended."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from acclimate.errors import AsyncIOError
from acclimate.ops.aio import failures
from acclimate.ops.aio.buffers import Buffer
from acclimate.ops.aio.engines import Engine, Outcome, Settings, start_engine
from acclimate.ops.aio.files import Name, OpenFile, Replacement, open_for_validation

logger = logging.getLogger("acclimate")

_VALIDATION_BYTES = 1 << 24


@dataclass
class Transfer:
    """One read or write on its way. It keeps the tensor and the file alive until it has ended."""

    buffer: Buffer
    file: OpenFile
    offset: int
    writes: bool
    validates: bool
    replacement: Replacement | None
    ticket: int = 0

    @property
    def name(self) -> Name:
        """The file's, as the caller gave it."""
        return self.file.name

    def finish(self, outcome: Outcome) -> None:
        """Delivers what was read, publishes what replaces a file, closes the files.

        Raises:
            AsyncIOError: the transfer failed, or what comes after it did.
        """
        length = self.buffer.length
        try:
            if outcome.error:
                raise failures.failed_transfer(self.name, outcome, self.offset, length, self.writes)
            try:
                if self.validates:
                    self._validate()
                if self.replacement is not None:
                    self.replacement.publish()
            except AsyncIOError:
                raise
            except OSError as error:
                raise failures.failed_call(self.name, error, self.offset, length, self.writes) from error
            if not self.writes:
                self.buffer.deliver()
        finally:
            self.discard()

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
    """An engine, and the transfers it was given that nobody has waited for yet.

    Belongs to one process: a forked child has the parent's memory but none of its threads.
    """

    def __init__(self, settings: Settings) -> None:
        self.process = os.getpid()
        self.engine: Engine = start_engine(settings)
        self._pending: dict[int, Transfer] = {}
        self._lock = threading.Lock()

    def start(self, transfer: Transfer) -> Transfer:
        """Hands a transfer to the engine and remembers it."""
        with self._lock:
            memory, file = transfer.buffer.memory, transfer.file
            transfer.ticket = self.engine.submit(memory, file, transfer.offset, transfer.writes)
            self._pending[transfer.ticket] = transfer
        return transfer

    def wait(self, transfers: Iterable[Transfer] | None = None) -> int:
        """Waits for some transfers, or for all; returns how many ended well.

        A transfer that another thread waits for is left to that thread.

        Raises:
            AsyncIOError: of each transfer that failed. The others have ended well.
        """
        with self._lock:
            wanted = list(self._pending.values()) if transfers is None else transfers
            taken = [t for t in wanted if self._pending.pop(t.ticket, None) is not None]
        errors: list[AsyncIOError] = []
        count = len(taken)
        while taken:
            try:
                outcome = self.engine.wait(taken[0].ticket)
            except BaseException:
                # Ctrl-C: the transfers go on, so what they use has to stay.
                with self._lock:
                    self._pending.update((transfer.ticket, transfer) for transfer in taken)
                raise
            transfer = taken.pop(0)
            try:
                transfer.finish(outcome)
            except AsyncIOError as error:
                errors.append(error)
        if errors:
            raise failures.together(errors)
        return count

    def close(self) -> None:
        """Finishes what is on its way and ends the engine.

        Raises:
            AsyncIOError: as :meth:`wait`.
        """
        if self.process != os.getpid():
            self.abandon()
            return
        try:
            self.wait()
        finally:
            self.engine.stop()

    def abandon(self) -> None:
        """In a forked child: leaves the engine and its transfers to the parent."""
        pending, self._pending = self._pending, {}
        self._lock = threading.Lock()  # another thread of the parent may have held it during the fork
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
