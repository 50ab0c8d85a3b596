"""The protocol between the launcher and its agents on other hosts.

Each message is a line of JSON. A message from a host that is too long or of the wrong types ends only the
connection that it came over.

Over TCP both sides first prove that they have the job's key, which is not sent. Else a program that listens
at one of the launcher's addresses could make an agent run anything, and a program that connects to the
launcher could take a rank's place.
"""

from __future__ import annotations

import fcntl
import hmac
import ipaddress
import os
import select
import signal
import socket
import sys
import termios
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

from acclimate.errors import LaunchProtocolError
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.plan.outcome import Outcome
from acclimate.launch.wire import LineBuffer, Message, decode, encode


@dataclass(frozen=True)
class Call:
    """A caller's first message."""

    name: str
    """A host's name in the hostfile, or the number of a rank."""
    nonce: str


@dataclass(frozen=True)
class Answer:
    """The launcher's answer."""

    nonce: str
    proof: str


def proof_of(key: str, side: Literal["launcher", "caller"], call: Call, nonce: str) -> str:
    """Returns a side's proof that it has the key; ``nonce`` is the launcher's."""
    text = "".join(f"{len(part)}:{part}" for part in (side, call.name, call.nonce, nonce))
    return hmac.new(key.encode(), text.encode(errors="replace"), "sha256").hexdigest()


def are_equal(given: str, wanted: str) -> bool:
    """Whether the proof of another side is the wanted one; takes the same time for any proof."""
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())


ALIVE_EVERY_S = 10.0
"""The interval of the launcher's heartbeats."""
SILENCE_S = 60.0
"""After this time without a message from the launcher, an agent ends its ranks."""
_PROBE_AFTER_S, _PROBES = 5, 3
LOST_AFTER_S = _PROBE_AFTER_S * _PROBES
"""After this time without an answer of its kernel, the launcher counts a host as lost."""
SEND_S = 30.0
"""The time limit for a send; after that the connection counts as broken."""
_LOOK_AGAIN_MS = 1000
_READ_BYTES = 1 << 16
AGENT_IS_HERE = b"\x1eacclimate-agent "
"""The mark of an agent's first message over ssh, before it gets a mark from the launcher."""

WINDOW_BYTES = 1 << 14
"""How much of a stream an agent sends before the launcher's reader has taken it. Both streams fit into an
unread connection, so that an agent does not wait in a send while the launcher is stopped."""
LONGEST_FROM_HOST = 1 << 20
"""The most bytes of a message from a host, mainly a failed rank's last lines."""
LONGEST_FROM_STRANGER = 1 << 12
"""The most bytes of a message from a side that has not proved its identity."""
LONGEST_FROM_LAUNCHER = 1 << 28
"""The most bytes of a message from the launcher; the plan contains all exported variables."""


@dataclass(frozen=True)
class Assignment:
    """An agent's assignment."""

    job: JobPlan
    node_rank: int
    """The node rank of the agent's host."""
    mark: str = ""
    """The mark with which its messages over ssh begin."""

    def __post_init__(self) -> None:
        """Refuses a host that is not in the job."""
        if not 0 <= self.node_rank < len(self.job.hosts):
            raise LaunchProtocolError(f"The job has no host {self.node_rank}.")


@dataclass(frozen=True)
class Ready:
    """An agent's message that it is ready."""

    address: str | None
    """This host's address for other hosts, if known."""
    port: int
    """A free port on that host."""

    def __post_init__(self) -> None:
        """Refuses invalid values, since ranks on all hosts would get them."""
        if self.address is not None:
            try:
                ipaddress.ip_address(self.address)
            except ValueError:
                raise LaunchProtocolError("ready.address is not an address.") from None
        if not 0 < self.port < 1 << 16:
            raise LaunchProtocolError("ready.port is not a port.")


@dataclass(frozen=True)
class Start:
    """The launcher's message that all hosts are ready, with the master's address and port."""

    master_addr: str
    master_port: int


@dataclass(frozen=True)
class Output:
    """A piece of the output of an agent's rank."""

    stream: int
    """1 or 2."""
    data: str
    """In base64."""

    def __post_init__(self) -> None:
        """Refuses other streams."""
        _check_stream(self.stream)


@dataclass(frozen=True)
class Taken:
    """The launcher's message that output was shown, so that the agent may send as much again."""

    stream: int
    """1 or 2."""
    count: int
    """In bytes."""

    def __post_init__(self) -> None:
        """Refuses other streams."""
        _check_stream(self.stream)


def _check_stream(stream: int) -> None:
    if stream not in (1, 2):
        raise LaunchProtocolError("A message names a stream that is not 1 or 2.")


FROM_HOST = {
    "here": bool,  # over ssh: the agent runs
    "call": Call,  # over TCP: who the agent is; the next two messages prove that both sides have the key
    "hello": str,
    "ready": Ready,
    "refused": str,  # why it cannot do its part
    "output": Output,
    "failed": Outcome,  # a rank failed, while others still run
    "outcome": Outcome,
}
"""The fields of a host's messages, with their types."""
FROM_LAUNCHER = {
    "answer": Answer,  # to a call
    "assignment": Assignment,
    "start": Start,
    "taken": Taken,
    "signal": int,  # to be passed on to the ranks
    "stop": str,  # why the ranks must end
    "alive": bool,
    "pause": bool,  # no `alive` comes until the next message
}
"""The fields of the launcher's messages, with their types."""


def check_outcome(outcome: Outcome, job: JobPlan) -> None:
    """Refuses an outcome that is impossible in the job.

    Raises:
        LaunchProtocolError: it names a rank, a signal or an exit code that does not exist.
    """
    failed = outcome.failed
    codes = [outcome.code, *([failed.code] if failed else [])]
    if not all(-signal.NSIG < code <= 255 for code in codes):
        raise LaunchProtocolError("A code must be an exit code up to 255, or minus a signal's number.")
    if failed is not None and not 0 <= failed.rank < job.world_size:
        raise LaunchProtocolError("It names a rank that does not exist.")


class PipeChannel:
    """A connection over two descriptors, such as those of a remote command: one to read, one to write.

    Ranks may write to the same stream, so each message there begins with a mark that they cannot know.

    Args:
        read_from: the descriptor to read.
        write_to: the descriptor to write.
        mark: the prefix of each message sent.
        waits_while_alive: whether sending may wait as long as messages arrive. An agent waits, because the
            launcher reads nothing while its own reader lags behind.
    """

    def __init__(
        self, read_from: int, write_to: int, mark: bytes = b"", *, waits_while_alive: bool = False
    ) -> None:
        self._read_from, self._write_to, self._mark = read_from, write_to, mark
        self._waits_while_alive = waits_while_alive
        self._lines = LineBuffer(LONGEST_FROM_LAUNCHER)

    def fileno(self) -> int:
        """Readable when bytes have arrived."""
        return self._read_from

    def mark_with(self, mark: str) -> None:
        """Sets the mark of all further messages."""
        self._mark = mark.encode()

    def send(self, message: Mapping[str, object]) -> None:
        """Sends a message. Gives up after 30 s; an agent waits while the launcher's messages arrive."""
        line = memoryview(self._mark + encode(message))
        writable = select.poll()
        writable.register(self._write_to, select.POLLOUT)
        patience_s = SILENCE_S if self._waits_while_alive else SEND_S
        unread, give_up = self._unread(), time.monotonic() + patience_s
        with suppress(BrokenPipeError):
            while line and time.monotonic() < give_up:
                wrote = bool(writable.poll(_LOOK_AGAIN_MS))
                if wrote:
                    line = line[os.write(self._write_to, line[: select.PIPE_BUF]) :]
                if self._waits_while_alive and (wrote or self._unread() != unread):
                    unread, give_up = self._unread(), time.monotonic() + patience_s

    def _unread(self) -> int:
        """Returns the number of unread bytes; 0 if unknown."""
        with suppress(OSError):
            count = fcntl.ioctl(self._read_from, termios.FIONREAD, b"\0" * 4)
            return int.from_bytes(count, sys.byteorder)
        return 0

    def receive(self) -> list[Message] | None:
        """Returns the launcher's messages; ``None`` if the other side has gone.

        Raises:
            LaunchProtocolError: the data is not a message.
        """
        piece = os.read(self._read_from, _READ_BYTES)
        return [decode(line, FROM_LAUNCHER) for line in self._lines.feed(piece)] if piece else None


class SocketChannel:
    """A TCP connection. The kernel detects the loss of the other host even without traffic."""

    def __init__(self, connection: socket.socket, kinds: Mapping[str, object]) -> None:
        self._connection = connection
        self._kinds = kinds
        self._lines = LineBuffer(LONGEST_FROM_STRANGER)
        connection.settimeout(SEND_S)  # receive() is called when there is something to read
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Some systems lack these options, but cannot run such a job anyway.
        for option, value in (
            ("TCP_KEEPIDLE", _PROBE_AFTER_S),
            ("TCP_KEEPINTVL", _PROBE_AFTER_S),
            ("TCP_KEEPCNT", _PROBES),
            ("TCP_USER_TIMEOUT", LOST_AFTER_S * 1000),
        ):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def fileno(self) -> int:
        """Readable when bytes have arrived."""
        return self._connection.fileno()

    def trust(self, limit: int) -> None:
        """Allows longer messages, once the other side has proved its identity."""
        self._lines.limit = limit

    @property
    def own_address(self) -> str:
        """This end's address, at which the other host can reach it."""
        return str(self._connection.getsockname()[0])

    def send(self, message: Mapping[str, object]) -> None:
        """Sends a message. Gives up after 30 s and closes the connection."""
        try:
            self._connection.sendall(encode(message))
        except OSError:
            with suppress(OSError):  # half a message may be sent: nothing more can follow it
                self._connection.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[Message] | None:
        """Returns the messages; ``None`` if the other side has gone.

        Raises:
            LaunchProtocolError: the data is not a message.
        """
        try:
            piece = self._connection.recv(_READ_BYTES)
        except OSError:
            return None
        return [decode(line, self._kinds) for line in self._lines.feed(piece)] if piece else None

    def end_sending(self) -> None:
        """Tells the other side that no message follows; its messages can still be received."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


Channel: TypeAlias = PipeChannel | SocketChannel
"""A connection to the other side, whose loss ``receive`` reports and ``send`` does not."""


class MessageDemux:
    """Separates an agent's messages, which begin with the mark, from its ranks' output on the same stream."""

    def __init__(self, mark: bytes) -> None:
        self.mark = mark
        self._held = b""
        """Bytes that may be the beginning of a mark."""
        self._message: LineBuffer | None = None
        """An unfinished message."""

    def feed(self, data: bytes) -> tuple[bytes, list[Message]]:
        """Returns the ranks' output and the agent's messages, in order.

        Raises:
            LaunchProtocolError: what follows a mark is not a message.
        """
        data, at, written, messages = self._held + data, 0, bytearray(), list[Message]()
        self._held = b""
        while True:
            if self._message is None:
                start = data.find(self.mark, at)
                if start < 0:
                    break
                written += data[at:start]
                self._message, at = LineBuffer(LONGEST_FROM_HOST), start + len(self.mark)
            end = data.find(b"\n", at) + 1
            lines = self._message.feed(data[at:end] if end else data[at:])
            if not lines:
                return bytes(written), messages
            self._message, at = None, end
            messages.append(decode(lines[0], FROM_HOST))
        rest = data[at:]
        for length in range(min(len(self.mark) - 1, len(rest)), 0, -1):
            if self.mark.startswith(rest[-length:]):
                self._held = rest[-length:]
                break
        return bytes(written) + rest[: len(rest) - len(self._held)], messages

    def end(self) -> bytes:
        """Returns the held-back bytes, at the end of the stream."""
        held = self._held if self._message is None else self.mark + self._message.rest
        self._held, self._message = b"", None
        return held
