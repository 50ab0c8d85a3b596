"""The address of this machine that a host sees."""

from __future__ import annotations

import socket


def address_towards(host: str) -> str:
    """Returns the address from which this machine would connect to a host.

    Raises:
        OSError: the host has no address, or there is no way to it.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing; asks the kernel for the route
        return str(probe.getsockname()[0])
