"""Registers the backend ``shm`` with ``torch.distributed``, and creates its groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from acclimate.accelerator.gloo_threads import settle_at_exit
from acclimate.comm.gloo import gloo_group, gloo_instead
from acclimate.comm.native import load_backend
from acclimate.comm.rendezvous import Opening, Rendezvous, are_on_one_host, why_not_shared
from acclimate.errors import AcclimateError

NAME = "shm"


def register() -> None:
    """Registers the backend ``shm`` with ``torch.distributed``; later calls do nothing."""
    settle_at_exit()  # groups between hosts use gloo, and any other group may
    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, devices=["cpu"])


def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Returns a group of this backend, or a gloo group if the ranks cannot share memory.

    Args:
        store: a store that only this group uses.
        rank: this process's rank.
        size: the number of ranks in the group.
        timeout: the timeout of each collective.
    """
    rendezvous = Rendezvous(store, rank, size, timeout)
    native, refusal = _native()
    offers = rendezvous.offers(refusal)
    if not are_on_one_host(offers):
        return gloo_group(store, rank, size, timeout)
    refusal = why_not_shared(offers, native.MOST_RANKS if native is not None else len(offers))
    if refusal:
        return gloo_instead(store, rank, size, timeout, refusal)

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

    joined = rendezvous.join(offers, native.bytes, open_group)
    if joined.refusal:
        return gloo_instead(store, rank, size, timeout, joined.refusal)
    return native.backend_of(joined.group)


def _native() -> tuple[Any, str]:
    try:
        return load_backend(), ""
    except (AcclimateError, OSError, ImportError) as error:
        return None, str(error)
