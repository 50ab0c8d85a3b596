"""Agents that call the launcher over TCP, if the engine passes them no input: both ends of the call."""

from __future__ import annotations

import errno
import math
import re
import resource
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import cast

from acclimate.errors import HostUnreachableError, LaunchProtocolError, excerpt
from acclimate.launch.event_loop import EventLoop
from acclimate.launch.remote.protocol import (
    FROM_HOST,
    FROM_LAUNCHER,
    LONGEST_FROM_HOST,
    LONGEST_FROM_LAUNCHER,
    Answer,
    Call,
    SocketChannel,
    are_equal,
    proof_of,
)
from acclimate.launch.wire import Message

LAUNCHER_VARIABLE = "ACCLIMATE_LAUNCHER"
"""A key, the launcher's addresses, best first, and its port: ``KEY@10.0.0.1,127.0.0.1:4242``."""
_CONNECT_S = 5.0
_LAUNCHER_ANSWER_S = 30.0
"""The time limit for the launcher's answer."""


def call_launcher(where: str, name: str) -> SocketChannel:
    """Connects to the first of the addresses in ``where`` at which the launcher proves its identity.

    ``where`` is the value of :data:`LAUNCHER_VARIABLE`; ``name``, of a host or rank, is who calls.

    Raises:
        HostUnreachableError: the launcher answers at none of its addresses.
        LaunchProtocolError: ``where`` has no address.
    """
    parts = re.fullmatch(r"(\w+)@(\S+):([0-9]{1,5})", where)
    if parts is None or int(parts[3]) > 65535:
        raise LaunchProtocolError(
            f'"{excerpt(where)}" is not the address of a launcher. `acclimate run` starts agents.'
        )
    key, addresses, port = parts.groups()
    reasons = []
    for address in filter(None, addresses.split(",")):
        try:
            connection = socket.create_connection((address, int(port)), timeout=_CONNECT_S)
        except (OSError, UnicodeError) as error:
            reasons.append(f"{address}: {getattr(error, 'strerror', None) or error}")
            continue
        if connection.getsockname() == connection.getpeername():
            connection.close()  # on loopback a free port may connect to itself
            reasons.append(f"{address}: no program listens")
            continue
        try:
            channel = SocketChannel(connection, FROM_LAUNCHER)
            _introduce(channel, key, name)
            return channel
        except (OSError, LaunchProtocolError) as error:
            connection.close()
            reasons.append(f"{address}: the program that answers is not this job's launcher ({error})")
    raise HostUnreachableError(
        f"{socket.gethostname()} cannot reach the launcher on port {port} ({'; '.join(reasons)}). Let hosts "
        "connect to the machine that starts the job, start it on one of them, or use --launcher ssh."
    )


def _introduce(channel: SocketChannel, key: str, name: str) -> None:
    """Identifies this agent, and checks that the launcher answers."""
    call = Call(name, secrets.token_hex(16))
    channel.send({"call": asdict(call)})
    answer = _wait_for_answer(channel)
    if not are_equal(answer.proof, proof_of(key, "launcher", call, answer.nonce)):
        raise LaunchProtocolError("it does not have the job's key")
    channel.send({"hello": proof_of(key, "caller", call, answer.nonce)})
    channel.trust(LONGEST_FROM_LAUNCHER)


def _wait_for_answer(channel: SocketChannel) -> Answer:
    give_up = time.monotonic() + _LAUNCHER_ANSWER_S
    while (left_s := give_up - time.monotonic()) > 0:
        if select.select([channel], [], [], left_s)[0]:
            messages = channel.receive()
            if messages is None:
                raise LaunchProtocolError("the connection was closed")
            for message in messages:
                if "answer" in message:
                    return cast(Answer, message["answer"])
    raise LaunchProtocolError(f"no answer within {_LAUNCHER_ANSWER_S:.0f} s")


HELLO_S = 10.0
"""The time limit for a caller's proof that it has the key."""
MOST_UNAUTHENTICATED = 64
"""How many callers without a proof are kept, besides one for each missing agent."""
KEPT_FREE = 16
"""Descriptors that unauthenticated callers must leave free for the launcher, which starts programs."""
_BACKLOG = 1024
_ACCEPT_AGAIN_S = 1.0
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(eq=False)
class _Caller:
    channel: SocketChannel
    since: float
    call: Call | None = None
    nonce: str = ""
    """That of the answer to the call."""
    is_known: bool = False
    """Whether it has proved that it has the key."""

    @property
    def name(self) -> str:
        return "" if self.call is None else self.call.name


class CallbackServer:
    """Listens on all addresses of this machine, and accepts agents that have the key.

    Args:
        loop: waits for the callers.
        key: the job's key.
        names: the agents' names, each a host or a rank. Each may call once.
        answered: called with a name and a channel when that agent has called.
        on_message: called with a name and a message; returns whether to keep the agent's connection.
        ended: called with a name and a reason when the connection has ended.
        hindered: called with a reason why agents may be unable to connect.
    """

    def __init__(
        self,
        loop: EventLoop,
        key: str,
        names: Iterable[str],
        *,
        answered: Callable[[str, SocketChannel], None],
        on_message: Callable[[str, Message], bool],
        ended: Callable[[str, str], None],
        hindered: Callable[[str], None],
    ) -> None:
        self._loop, self._key = loop, key
        self._awaited = set(names)
        self._answered, self._on_message, self._ended, self._hindered = answered, on_message, ended, hindered
        self._unauthenticated: dict[_Caller, None] = {}  # in the order in which they came
        self._room: float = math.inf
        """The most unauthenticated callers that fit the launcher's descriptors; set once it is known."""
        self._agents: set[_Caller] = set()
        self._is_watched = False
        self._sweeps = False
        self._socket = _listen()
        self._listens(True)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._socket.getsockname()[1])

    @property
    def has_agents(self) -> bool:
        """Whether an agent that called is still connected."""
        return bool(self._agents)

    def close(self) -> None:
        """Closes the port and all connections, after which agents end their ranks."""
        self._close_port()
        for caller in list(self._agents):
            self._drop(caller)

    def _close_port(self) -> None:
        self._listens(False)
        self._socket.close()
        for caller in list(self._unauthenticated):
            self._drop(caller)

    def _listens(self, wanted: bool) -> None:
        if wanted and not self._is_watched and self._socket.fileno() >= 0:
            self._loop.watch(self._socket.fileno(), self._accept)
            self._is_watched = True
        elif self._is_watched and not wanted:
            self._loop.forget(self._socket.fileno())
            self._is_watched = False

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return  # it has hung up already
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS and self._unauthenticated:
                self._drop(next(iter(self._unauthenticated)))
                return
            self._hindered(f"callers cannot be accepted: {error.strerror}.")
            self._listens(False)
            self._loop.after(_ACCEPT_AGAIN_S, partial(self._listens, True))
            return
        try:
            caller = _Caller(SocketChannel(connection, FROM_HOST), time.monotonic())
        except OSError:
            connection.close()
            return
        if connection.fileno() >= _descriptors() - KEPT_FREE:
            self._room = min(self._room, len(self._unauthenticated))
        most = min(self._room, MOST_UNAUTHENTICATED + len(self._awaited))
        if self._unauthenticated and len(self._unauthenticated) >= most:
            # Drops the oldest: agents send at once, so it is not an agent.
            self._drop(next(iter(self._unauthenticated)))
        self._unauthenticated[caller] = None
        self._loop.watch(caller.channel.fileno(), partial(self._listen_to, caller))
        if not self._sweeps:
            self._sweeps = True
            self._loop.after(HELLO_S, self._drop_the_silent)

    def _drop_the_silent(self) -> None:
        now, self._sweeps = time.monotonic(), False
        for caller in list(self._unauthenticated):
            if caller.since + HELLO_S > now:
                self._sweeps = True
                self._loop.after(caller.since + HELLO_S - now, self._drop_the_silent)
                return
            self._drop(caller)

    def _drop(self, caller: _Caller) -> None:
        self._unauthenticated.pop(caller, None)
        self._agents.discard(caller)
        self._loop.forget(caller.channel.fileno())
        caller.channel.close()

    def _listen_to(self, caller: _Caller) -> None:
        reason = "ended or was disconnected"
        messages: list[Message] | None = None
        try:
            messages = caller.channel.receive()
        except LaunchProtocolError as error:
            reason = f"sent an invalid message: {error}"
        for message in messages or ():
            wanted = (
                self._on_message(caller.name, message)
                if caller.is_known
                else self._proves_itself(caller, message)
            )
            if not wanted:
                self._drop(caller)
                return
        if messages is None:
            self._drop(caller)
            if caller.is_known:
                self._ended(caller.name, reason)

    def _proves_itself(self, caller: _Caller, message: Message) -> bool:
        """Whether a message is the next step of an agent's proof."""
        if caller.call is None:
            call = message.get("call")
            if call is None or call.name not in self._awaited:
                return False
            caller.call, caller.nonce = call, secrets.token_hex(16)
            answer = Answer(caller.nonce, proof_of(self._key, "launcher", call, caller.nonce))
            caller.channel.send({"answer": asdict(answer)})
            return True
        wanted = proof_of(self._key, "caller", caller.call, caller.nonce)
        if caller.name not in self._awaited or not are_equal(message.get("hello", ""), wanted):
            return False
        caller.is_known = True
        caller.channel.trust(LONGEST_FROM_HOST)
        self._awaited.discard(caller.name)
        self._agents.add(caller)
        del self._unauthenticated[caller]
        if not self._awaited:
            self._close_port()
        self._answered(caller.name, caller.channel)
        return True


def _descriptors() -> float:
    """Returns how many descriptors this process may have; a new one gets the lowest free number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if limit == resource.RLIM_INFINITY else limit


def _listen() -> socket.socket:
    """Returns a socket on a free port of all addresses of this machine."""
    if socket.has_dualstack_ipv6():
        listening = socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    else:
        listening = socket.create_server(("", 0), backlog=_BACKLOG)
    listening.setblocking(False)  # a caller may have hung up before it is accepted
    return listening
