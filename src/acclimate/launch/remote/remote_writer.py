"""Sends the output of an agent's ranks to the launcher, in messages."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import asdict

from acclimate.launch.event_loop import EventLoop
from acclimate.launch.output.writer import Writer
from acclimate.launch.remote.protocol import WINDOW_BYTES, Channel, Output

_PIECE_BYTES = 1 << 13


class RemoteWriter(Writer):
    """One of the launcher's streams, seen from an agent.

    Args:
        channel: to the launcher.
        stream: 1 or 2.
    """

    def __init__(self, channel: Channel, stream: int) -> None:
        super().__init__()
        self._channel, self._stream = channel, stream
        self._room = WINDOW_BYTES
        self._react: Callable[[], None] | None = None

    def drain(self) -> None:
        """Sends as much as the launcher has room for."""
        while self._waiting and self._may_send():
            piece = bytes(self._waiting[: min(_PIECE_BYTES, self._room)])
            self._room -= len(piece)
            del self._waiting[: len(piece)]
            output = Output(self._stream, base64.b64encode(piece).decode())
            self._channel.send({"output": asdict(output)})

    def _may_send(self) -> bool:
        """Whether a whole piece can be sent, or nothing is under way: not many small ones, as in TCP."""
        return self._room == WINDOW_BYTES or min(len(self._waiting), self._room) >= _PIECE_BYTES

    def taken(self, count: int) -> None:
        """Handles the launcher's message that it has shown some bytes."""
        self._room += count
        if self._react is not None:
            self._react()

    def fail(self, error: OSError) -> None:
        """Drops all output, since the launcher has gone."""
        self.error = error
        self._waiting.clear()
        if self._react is not None:
            self._react()

    def watch(self, loop: EventLoop, react: Callable[[], None]) -> None:
        """Calls back when the launcher has room again."""
        self._react = react

    def unwatch(self, loop: EventLoop) -> None:
        """Ends :meth:`watch`."""
        self._react = None
