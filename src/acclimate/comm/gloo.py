"""Groups of gloo: between hosts, and for ranks that cannot share memory."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from acclimate.host.local_address import address_towards

LONGEST_TIMEOUT = timedelta(days=365 * 100)
"""torch and gloo add a time-out to a clock in nanoseconds, which overflows after 292 years."""

_logger = logging.getLogger("acclimate")


def gloo_instead(store: Any, rank: int, size: int, timeout: timedelta, refusal: str) -> Any:
    """Returns a gloo group; rank 0 logs a warning.

    Args:
        store: a store that only this group uses.
        rank: this process's rank.
        size: the number of ranks in the group.
        timeout: the timeout of each collective.
        refusal: why the ranks cannot share memory.
    """
    if rank == 0:
        _logger.warning(
            "This group of %d ranks uses gloo, which gives the same results but is slower, because the "
            "ranks cannot share memory: %s.",
            size,
            refusal,
        )
    return gloo_group(store, rank, size, timeout)


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Returns a gloo group, bound to the address from which this host reaches the store.

    By default gloo binds the address that the host name resolves to, which is a loopback address on many
    systems. If ``GLOO_SOCKET_IFNAME`` is set, gloo uses that interface.

    Args:
        store: a store that only this group uses.
        rank: this process's rank.
        size: the number of ranks in the group.
        timeout: the timeout of each collective.
    """
    timeout = min(timeout, LONGEST_TIMEOUT)
    address = None if os.environ.get("GLOO_SOCKET_IFNAME") else _address_towards(store)
    if address is None:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _address_towards(store: Any) -> str | None:
    """Returns this host's address in the store's network; ``None`` if the store has no address."""
    while isinstance(store, distributed_c10d.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    try:
        return address_towards(store.host)
    except OSError:
        return None
