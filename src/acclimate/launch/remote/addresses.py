"""Addresses and ports of this machine."""

from __future__ import annotations

import socket
from contextlib import closing, suppress

from acclimate.host.local_address import address_towards, is_loopback


def own_addresses(hosts: list[str]) -> list[str]:
    """Returns the addresses at which others may reach this machine, best first.

    Those from which it would connect to the hosts come first, then those of its name, then loopback for ranks
    on this machine.
    """
    found: list[str] = []
    for host in hosts:
        with suppress(OSError):
            found.append(address_towards(host))
    with suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    outside = [address for address in dict.fromkeys(found) if not is_loopback(address)]
    return [*outside, "127.0.0.1"]


def free_port() -> int:
    """Returns a port that is free on all addresses of this host."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with closing(
        socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6)
    ) as server:
        return int(server.getsockname()[1])
