"""Registers the backend ``shm`` with ``torch.distributed``; creates its groups, and gloo's between hosts."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from acclimate.accelerator.gloo_threads import settle_at_exit
from acclimate.comm.native import load_backend
from acclimate.comm.rendezvous import Rendezvous, are_on_one_host, why_not_shared
from acclimate.errors import AcclimateError
from acclimate.host.local_address import address_towards

NAME = "shm"

LONGEST_TIMEOUT = timedelta(days=365 * 100)
"""torch and gloo add a time-out to a clock in nanoseconds, which overflows after 292 years."""

_logger = logging.getLogger("acclimate")


def register() -> None:
    """Registers the backend ``shm`` with ``torch.distributed``; later calls do nothing."""
    settle_at_exit()  # groups between hosts use gloo, and any other group may
    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, devices=["cpu"])


def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Returns a group of this backend, or of gloo if ranks cannot share memory; only it uses the store."""
    rendezvous = Rendezvous(store, rank, size, timeout)
    native, refusal = _native()
    offers = rendezvous.offers(refusal)
    if not are_on_one_host(offers):
        return gloo_group(store, rank, size, timeout)
    refusal = why_not_shared(offers, native.MOST_RANKS if native is not None else len(offers))
    if refusal:
        return gloo_instead(store, rank, size, timeout, refusal)
    group, refusal = rendezvous.join(offers, native.bytes, native.open_group)
    if refusal:
        return gloo_instead(store, rank, size, timeout, refusal)
    return native.backend_of(group)


def _native() -> tuple[Any, str]:
    try:
        return load_backend(), ""
    except (AcclimateError, OSError, ImportError) as error:
        return None, str(error)


def gloo_instead(store: Any, rank: int, size: int, timeout: timedelta, refusal: str) -> Any:
    """Returns a gloo group; rank 0 logs a warning that says why the ranks cannot share memory."""
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
