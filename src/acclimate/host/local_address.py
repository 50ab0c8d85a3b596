"""The addresses of this machine that other hosts see, and the network interface that has one."""

from __future__ import annotations

import ipaddress
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
