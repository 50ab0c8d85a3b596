"""Connects an agent to the launcher over TCP, if the engine passes it no input."""

from __future__ import annotations

import re
import select
import socket
import time
from dataclasses import asdict
from typing import cast

from acclimate.errors import HostUnreachableError, LaunchProtocolError, excerpt
from acclimate.launch.remote.protocol import (
    FROM_LAUNCHER,
    LONGEST_FROM_LAUNCHER,
    Answer,
    Call,
    SocketChannel,
    caller_proof,
    new_nonce,
    proves_launcher,
)

LAUNCHER_VARIABLE = "ACCLIMATE_LAUNCHER"
"""A key, the launcher's addresses, best first, and its port: ``KEY@10.0.0.1,127.0.0.1:4242``."""
_CONNECT_S = 5.0
_LAUNCHER_ANSWER_S = 30.0
"""The time limit for the launcher's answer."""


def call_launcher(where: str, name: str) -> SocketChannel:
    """Connects to the first address at which the launcher answers and proves its identity.

    Args:
        where: the value of :data:`LAUNCHER_VARIABLE`.
        name: the name of the host or rank that calls.

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
    call = Call(name, new_nonce())
    channel.send({"call": asdict(call)})
    answer = _wait_for_answer(channel)
    if not proves_launcher(key, call, answer):
        raise LaunchProtocolError("it does not have the job's key")
    channel.send({"hello": caller_proof(key, call, answer)})
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
