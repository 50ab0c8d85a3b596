"""How a slot or an agent finds the launcher where its engine passes no input on: it calls it over TCP."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from typing import Any

from acclimate.errors import HostUnreachableError, LaunchProtocolError
from acclimate.launch.remote.protocol import SocketChannel

LAUNCHER_VARIABLE = "ACCLIMATE_LAUNCHER"
"""A key, the launcher's addresses, best first, and its port: ``KEY@10.0.0.1,127.0.0.1:4242``."""
_CONNECT_S = 5.0


def call_launcher(where: str, hello: Mapping[str, Any]) -> SocketChannel:
    """Connects to the first of the launcher's addresses that answers, and says who calls.

    Args:
        where: as :data:`LAUNCHER_VARIABLE` has it.
        hello: which rank or host calls.

    Raises:
        HostUnreachableError: none does.
        LaunchProtocolError: ``where`` is nothing of the kind.
    """
    parts = re.fullmatch(r"(\w+)@(\S+):(\d{1,5})", where)
    if parts is None:
        raise LaunchProtocolError(
            f'"{where}" says nothing of where the launcher is. `acclimate run` starts agents and slots.'
        )
    key, addresses, port = parts.groups()
    reasons = []
    for address in filter(None, addresses.split(",")):
        try:
            connection = socket.create_connection((address, int(port)), timeout=_CONNECT_S)
        except OSError as error:
            reasons.append(f"{address}: {error.strerror or error}")
            continue
        if connection.getsockname() == connection.getpeername():
            connection.close()  # on loopback a free port may connect to itself
            reasons.append(f"{address}: nobody listens")
            continue
        channel = SocketChannel(connection)
        channel.send({"hello": {"key": key, **hello}})
        return channel
    raise HostUnreachableError(
        f"{socket.gethostname()} cannot reach the launcher on port {port} ({'; '.join(reasons)}). Let hosts "
        "connect to the machine that starts the job, start it on one of them, or use --launcher ssh."
    )
