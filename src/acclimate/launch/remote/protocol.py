"""What the launcher and those who start ranks on the hosts tell each other: a line of JSON each.

From the launcher: ``job`` (what to run, and which part of it), ``start`` (all hosts answered: the address and
port of the master), ``signal`` (to be passed on), ``stop`` (why the ranks have to end), ``alive``, ``pause``
(no ``alive`` until the next message). From a host: ``hello`` (it is there, and who it is), ``ready``,
``refused`` (why it cannot), ``failed`` (a rank did, while others still run), ``outcome``.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import sys
import termios
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

Message = dict[str, Any]

ALIVE_EVERY_S = 10.0
"""How often the launcher says that it is still there."""
SILENCE_S = 60.0
"""After so long without a word from the launcher its host is taken for lost, and the ranks are ended."""
_PROBE_AFTER_S, _PROBES = 5, 3
LOST_AFTER_S = _PROBE_AFTER_S * _PROBES
"""After so long without an answer of its kernel a host is taken for lost by the launcher."""
_NOT_READING_S = 10.0
_LOOK_AGAIN_MS = 1000
_READ_BYTES = 1 << 16
AGENT_IS_HERE = b"\x1eacclimate-agent "
"""What an agent's first words begin with, before the launcher has told it a mark of its own."""


class Channel(Protocol):
    """Both ways of talking to the other side."""

    def fileno(self) -> int:
        """Readable when there is something to receive."""
        ...

    def send(self, message: Mapping[str, Any]) -> None:
        """Says something; where the other side is gone it is lost, which the next :meth:`receive` tells."""
        ...

    def receive(self) -> list[Message] | None:
        """What has come, waiting for the next piece of it; ``None`` when the other side is gone."""
        ...


class Lines:
    """Puts lines together from pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that this piece completes, without their ends."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return lines


def decode(line: bytes) -> Message:
    """A line as a message; an empty one where it is none, which everybody ignores."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as a line."""
    return json.dumps(message).encode() + b"\n"


class PipeChannel(Channel):
    """Over two descriptors, as those of a remote command: one is read, the other written.

    Others may write to the same stream, so each message there begins with a mark that they cannot know.
    """

    def __init__(
        self, read_from: int, write_to: int, mark: bytes = b"", *, waits_for_the_living: bool = False
    ) -> None:
        self._read_from, self._write_to, self._mark = read_from, write_to, mark
        self._waits_for_the_living = waits_for_the_living
        self._lines = Lines()

    def fileno(self) -> int:
        """Readable when there is something to receive."""
        return self._read_from

    def mark_with(self, mark: str) -> None:
        """Begins each message from now on with this."""
        self._mark = mark.encode()

    def send(self, message: Mapping[str, Any]) -> None:
        """Says something; a reader that is gone is told by :meth:`receive`.

        One that does not read is not waited for for ever, as its connection may be cut; but for as long as it
        says that it is there, where it does: the launcher takes nothing while its own reader is behind.
        """
        line = self._mark + encode(message)
        room = select.poll()
        room.register(self._write_to, select.POLLOUT)
        patience_s = SILENCE_S if self._waits_for_the_living else _NOT_READING_S
        unread, give_up = self._unread(), time.monotonic() + patience_s
        with suppress(BrokenPipeError):
            while line and time.monotonic() < give_up:
                if room.poll(_LOOK_AGAIN_MS):
                    line = line[os.write(self._write_to, line[: select.PIPE_BUF]) :]
                elif not self._waits_for_the_living or self._unread() == unread:
                    continue
                unread, give_up = self._unread(), time.monotonic() + patience_s

    def _unread(self) -> int:
        """How many bytes have come that were not received yet; 0 where that cannot be told."""
        with suppress(OSError):
            count = fcntl.ioctl(self._read_from, termios.FIONREAD, b"\0" * 4)
            return int.from_bytes(count, sys.byteorder)
        return 0

    def receive(self) -> list[Message] | None:
        """What has come, waiting for the next piece; ``None`` when the other side is gone."""
        piece = os.read(self._read_from, _READ_BYTES)
        return [decode(line) for line in self._lines.feed(piece)] if piece else None


class SocketChannel(Channel):
    """Over TCP. The kernel finds out when the other host is gone, also while nothing is said."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = Lines()
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Absent on systems where such a job cannot be run anyway.
        for option, value in (
            ("TCP_KEEPIDLE", _PROBE_AFTER_S),
            ("TCP_KEEPINTVL", _PROBE_AFTER_S),
            ("TCP_KEEPCNT", _PROBES),
            ("TCP_USER_TIMEOUT", LOST_AFTER_S * 1000),
        ):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def fileno(self) -> int:
        """Readable when there is something to receive."""
        return self._connection.fileno()

    @property
    def own_address(self) -> str:
        """The address of this end, by which the other end's host can reach this one."""
        return str(self._connection.getsockname()[0])

    def send(self, message: Mapping[str, Any]) -> None:
        """Says something; a reader that is gone is told by :meth:`receive`."""
        with suppress(OSError):
            self._connection.sendall(encode(message))

    def receive(self) -> list[Message] | None:
        """What has come, waiting for the next piece; ``None`` when the other side is gone."""
        try:
            piece = self._connection.recv(_READ_BYTES)
        except OSError:
            return None
        return [decode(line) for line in self._lines.feed(piece)] if piece else None

    def close(self) -> None:
        """Ends it."""
        self._connection.close()
