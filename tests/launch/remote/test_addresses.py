"""Addresses and ports of this machine."""

from __future__ import annotations

import socket

from acclimate.host.local_address import own_addresses


def test_loopback_is_the_last_address_that_others_are_told() -> None:
    addresses = own_addresses(["localhost", socket.gethostname()])
    assert addresses[-1] == "127.0.0.1"
    assert not [address for address in addresses[:-1] if address.startswith("127.")]
