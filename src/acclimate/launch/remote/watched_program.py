"""A program that reaches hosts, such as ssh or mpirun: its output, and its end."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import termios
from collections.abc import Callable
from functools import partial

from acclimate.launch.event_loop import EventLoop
from acclimate.launch.output.pump import OutputPump

_READ_BYTES = 1 << 16


class WatchedProgram:
    """A running program, whose output ends when it exits.

    A process that it leaves behind, such as the master of ssh's ``ControlPersist``, may keep a pipe open and
    write to it; what it writes after the program's exit is not read.

    Args:
        loop: waits for output and for the exit.
        process: has pipes for the streams to read.
        received: called with a stream's number and its output, which is empty at the stream's end.
        exited: called once with the exit code, after the ends of all streams.
        pump: pauses a stream while its reader lags behind; ``None`` if the output is not shown.

    Raises:
        OSError: the limit on open files is reached; the program has been killed.
    """

    def __init__(
        self,
        loop: EventLoop,
        process: subprocess.Popen[bytes],
        received: Callable[[int, bytes], None],
        exited: Callable[[int], None],
        pump: OutputPump | None = None,
    ) -> None:
        self.process = process
        self.running = True
        """Whether the program runs or has unread output."""
        self._loop, self._received, self._exited, self._pump = loop, received, exited, pump
        self._open: dict[int, int] = {}
        """The descriptor of each stream that has not ended."""
        self._unread: dict[int, int] = {}
        """After the exit: the bytes of each stream that are still to be read."""
        try:
            self._exit = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            with process:
                raise
        loop.watch(self._exit, self._reap)
        for stream, file in ((1, process.stdout), (2, process.stderr)):
            if file is None:
                continue
            self._open[stream] = file.fileno()
            if pump is None:
                loop.watch(file.fileno(), partial(self._read, stream))
            else:
                pump.read_from(file.fileno(), stream, partial(self._read, stream))

    @property
    def has_closed_its_streams(self) -> bool:
        """Whether no more output can come."""
        return not self._open

    def kill(self) -> None:
        """Kills the program, if it still runs; the end of its output and its exit follow."""
        self.process.kill()

    def close(self) -> None:
        """Closes the pipes and waits for the exit. The loop is not used any more."""
        if self._exit >= 0:
            os.close(self._exit)
            self._exit = -1
        with self.process:
            pass

    def _reap(self) -> None:
        self._loop.forget(self._exit)
        os.close(self._exit)
        self._exit = -1
        self.process.wait()
        for stream, pipe in list(self._open.items()):
            size = fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4)
            self._unread[stream] = int.from_bytes(size, sys.byteorder)
            if not self._unread[stream]:
                self._end(stream)
        self._conclude()

    def _read(self, stream: int) -> None:
        data = os.read(self._open[stream], min(_READ_BYTES, self._unread.get(stream, _READ_BYTES)))
        if data:
            self._received(stream, data)
        if stream in self._unread:
            self._unread[stream] -= len(data)
        if not data or self._unread.get(stream) == 0:
            self._end(stream)
            self._conclude()

    def _end(self, stream: int) -> None:
        pipe = self._open.pop(stream)
        self._received(stream, b"")
        if self._pump is None:
            self._loop.forget(pipe)
        else:
            self._pump.forget(pipe)

    def _conclude(self) -> None:
        code = self.process.returncode
        if self.running and not self._open and code is not None:
            self.running = False
            self._exited(code)
