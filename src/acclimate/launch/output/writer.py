"""The destinations of output: a stream with a slow or closed reader, a log file, the last lines."""

from __future__ import annotations

import os
import select
import selectors
import stat
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from pathlib import Path

from acclimate.launch.event_loop import EventLoop
from acclimate.launch.plan.outcome import KEPT_BYTES, KEPT_LINES


class CurrentLine:
    """Receives a line piece by piece, each byte once; keeps its visible part, or the first bytes of that."""

    def __init__(self, kept_bytes: int | None = None) -> None:
        self._kept_bytes = kept_bytes
        self._shown = bytearray()
        self._returned = False
        """Whether the last byte was a carriage return, so that the next piece replaces the line."""

    def __len__(self) -> int:
        return len(self._shown)

    def feed(self, piece: bytes) -> None:
        """Adds a piece without a newline."""
        body = piece.rstrip(b"\r")
        if body:
            _, returned, after = body.rpartition(b"\r")
            if returned or self._returned:
                self._shown.clear()
            room = len(after) if self._kept_bytes is None else max(0, self._kept_bytes - len(self._shown))
            self._shown += after[:room]
            self._returned = False
        self._returned |= len(body) < len(piece)

    def start(self, size: int) -> bytes:
        """Returns the first visible bytes."""
        return bytes(self._shown[:size])

    def take(self) -> bytes:
        """Returns the visible part and starts a new line."""
        shown = bytes(self._shown)
        self._shown.clear()
        self._returned = False
        return shown


# A pipe that poll() calls writable takes this much at once without blocking (POSIX: at least 512).
_PIPE_ROOM = getattr(select, "PIPE_BUF", 512)


class Writer(ABC):
    """The destination of a stream; keeps output until a slow reader takes it."""

    FULL = 1 << 20
    """With this many waiting bytes, the launcher stops reading the ranks' output."""

    def __init__(self, descriptor: int = -1) -> None:
        self.descriptor = descriptor
        """-1: this process does not write to the stream itself."""
        self.is_terminal = os.isatty(descriptor)
        self.error: OSError | None = None
        """Set once the stream cannot be written; later output is dropped."""
        self._waiting = bytearray()

    @property
    def waiting(self) -> int:
        """The number of bytes that wait for the reader."""
        return len(self._waiting)

    def write(self, data: bytes | bytearray) -> None:
        """Writes as much as the reader accepts now, and keeps the rest for :meth:`drain`."""
        if self.error is None:
            self._waiting += data
            self.drain()

    @abstractmethod
    def drain(self) -> None:
        """Writes as much as it can without blocking."""

    @abstractmethod
    def watch(self, loop: EventLoop, react: Callable[[], None]) -> None:
        """Calls back when the reader may accept more."""

    @abstractmethod
    def unwatch(self, loop: EventLoop) -> None:
        """Ends :meth:`watch`."""


class StreamWriter(Writer):
    """One of the launcher's own streams.

    The descriptor is never made non-blocking: the shell and others on the terminal share that setting.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def drain(self) -> None:
        while self._waiting and (self._is_file or self._poll.poll(0)):
            room = len(self._waiting) if self._is_file else _PIPE_ROOM
            try:
                written = os.write(self.descriptor, self._waiting[:room])
            except OSError as error:
                self.error = error
                self._waiting.clear()
                return
            del self._waiting[:written]

    def watch(self, loop: EventLoop, react: Callable[[], None]) -> None:
        loop.watch(self.descriptor, react, selectors.EVENT_WRITE)

    def unwatch(self, loop: EventLoop) -> None:
        loop.forget(self.descriptor)


class LogFile:
    """A rank's log file. A full disk ends the log but not the job."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.error: OSError | None = None
        # Opened for appending, so that a second run does not delete the log of the first, and without
        # blocking, since a named pipe without a reader would stop the launcher for ever.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        self.descriptor = os.open(path, flags, 0o644)

    def write(self, data: bytes) -> None:
        """Appends data; an error is stored in ``error`` and ends the log."""
        while data and self.error is None:
            try:
                data = data[os.write(self.descriptor, data) :]
            except OSError as error:
                self.error = error

    def close(self) -> None:
        """Closes the file; some file systems report only now that it could not be written."""
        try:
            os.close(self.descriptor)
        except OSError as error:
            self.error = self.error or error


class Tail:
    """The last lines of a rank's two streams, in order of arrival."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._unfinished: dict[int, CurrentLine] = {}

    def feed(self, stream: int, data: bytes) -> None:
        """Receives output of stream 1 or 2."""
        current = self._unfinished.setdefault(stream, CurrentLine(KEPT_BYTES))
        first, *others = data.split(b"\n")
        current.feed(first)
        for piece in others[-KEPT_LINES - 1 :]:
            self._lines.append(current.take())
            current.feed(piece)

    def lines(self) -> tuple[str, ...]:
        """Returns the last lines, unfinished ones at the end."""
        shown = (current.start(KEPT_BYTES) for current in self._unfinished.values())
        kept = [*self._lines, *(line for line in shown if line.strip())][-KEPT_LINES:]
        return tuple(line.decode(errors="backslashreplace") for line in kept)
