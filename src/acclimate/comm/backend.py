"""Registers the backend ``shm`` with ``torch.distributed``, and creates its groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from acclimate.accelerator.gloo_threads import settle_at_exit
from acclimate.comm.gloo import gloo_group, gloo_instead
from acclimate.comm.native import load_backend
from acclimate.comm.rendezvous import Offer, Opening, Rendezvous, ranks_by_host, why_not_shared
from acclimate.errors import AcclimateError

NAME = "shm"


def register() -> None:
    """Registers the backend ``shm`` with ``torch.distributed``; later calls do nothing."""
    settle_at_exit()  # groups between hosts use gloo, and any other group may
    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, devices=["cpu"])


def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Returns a group of this backend, or a gloo group where the ranks cannot share memory.

    Ranks on several hosts share memory within each host, and gloo connects the hosts.

    Args:
        store: a store that only this group uses.
        rank: this process's rank.
        size: the number of ranks in the group.
        timeout: the timeout of each collective.
    """
    rendezvous = Rendezvous(store, rank, size, timeout)
    native, refusal = _native()
    offers = rendezvous.offers(refusal)
    refusal = why_not_shared(offers, native.MOST_RANKS if native is not None else len(offers))
    if not refusal:
        hosts = ranks_by_host(offers)
        local, refusal = _on_this_host(native, store, offers, hosts, rank, timeout)
        if len(hosts) > 1:
            refusal = rendezvous.agree("hosts", refusal)
        if not refusal and len(hosts) == 1:
            return native.on_one_host(local)
        if not refusal:
            return _across_hosts(native, local, store, offers, hosts, rank, timeout)
    return gloo_instead(store, rank, size, timeout, refusal)


def _on_this_host(
    native: Any, store: Any, offers: tuple[Offer, ...], hosts: list[list[int]], rank: int, timeout: timedelta
) -> tuple[Any, str]:
    """Returns the group of this host's ranks and "", or ``None`` and the reason why there is none."""

    def open_group(opening: Opening) -> Any:
        geometry = opening.memory.geometry
        return native.open_group(
            opening.memory.descriptor,
            opening.rank,
            opening.processes,
            geometry.slot_bytes,
            geometry.ring_bytes,
            int(timeout.total_seconds() * 1000),
            opening.has_spare_cores,
        )

    number, ranks = next((number, ranks) for number, ranks in enumerate(hosts) if rank in ranks)
    own_store = distributed_c10d.PrefixStore(f"host/{number}", store)
    rendezvous = Rendezvous(own_store, ranks.index(rank), len(ranks), timeout, ranks)
    joined = rendezvous.join(tuple(offers[other] for other in ranks), native.bytes, open_group)
    return joined.group, joined.refusal


def _across_hosts(
    native: Any,
    local: Any,
    store: Any,
    offers: tuple[Offer, ...],
    hosts: list[list[int]],
    rank: int,
    timeout: timedelta,
) -> Any:
    leaders = [ranks[0] for ranks in hosts]
    between_leaders = None
    if rank in leaders:
        own = distributed_c10d.PrefixStore("leaders", store)
        between_leaders = gloo_group(own, leaders.index(rank), len(leaders), timeout)
    everyone = gloo_group(distributed_c10d.PrefixStore("everyone", store), rank, len(offers), timeout)
    named = [(offers[ranks[0]].name, ranks) for ranks in hosts]
    status = distributed_c10d.PrefixStore("status", store)
    return native.across_hosts(local, rank, named, between_leaders, everyone, status)


def _native() -> tuple[Any, str]:
    try:
        return load_backend(), ""
    except (AcclimateError, OSError, ImportError) as error:
        return None, str(error)
