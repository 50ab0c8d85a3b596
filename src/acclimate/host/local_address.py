"""The addresses of this machine that other hosts see, and the network interface that has one."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import closing, suppress


def address_towards(host: str) -> str:
    """Returns the address from which this machine would connect to a host.

    Raises:
        OSError: the host has no address, or there is no way to it.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing; asks the kernel for the route
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Whether only the host itself can use this address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def own_name_is_loopback() -> bool:
    """Whether this machine's name resolves to a loopback address, such as 127.0.1.1 on Debian."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:  # it has no address at all
        return True
    return is_loopback(str(found[0][4][0]))


def interface_towards(hosts: list[str]) -> str | None:
    """Returns the network interface towards the first of these hosts that is another, reachable machine.

    ``None`` if there is no such host.
    """
    for host in hosts:
        try:
            address = address_towards(host)
        except OSError:
            continue
        if not is_loopback(address):
            return _interface_of(address)
    return None


def _interface_of(address: str) -> str | None:
    import psutil  # most processes that import this module need no list of interfaces

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in addresses):
            return str(name)
    return None


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
