"""Ports of this machine for programs that tests start."""

from __future__ import annotations

import random
import socket

_LOWEST, _HIGHEST = 10_000, 29_000
_chance = random.SystemRandom()


def free_port() -> int:
    """A port on which a program can listen a little later.

    The system gives ports above 32,767 to whoever asks for any, such as other tests, so this one is below.
    """
    while True:
        port = _chance.randint(_LOWEST, _HIGHEST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
