"""Makes the backend ``shm`` known to ``torch.distributed``, and creates its groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from acclimate.comm.gloo import gloo_instead
from acclimate.comm.native import load_backend
from acclimate.comm.rendezvous import Opening, Rendezvous, why_not_shared
from acclimate.errors import AcclimateError

NAME = "shm"


def register() -> None:
    """Lets ``torch.distributed`` create groups by the name ``shm``; once, however often it is called."""
    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, devices=["cpu"])


def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A group of this backend, or one of gloo's where the ranks cannot share memory.

    Args:
        store: of the group alone.
        rank: this one.
        size: of the group.
        timeout: of each collective.
    """
    rendezvous = Rendezvous(store, rank, size)
    native, refusal = _native()
    offers = rendezvous.offers(refusal)
    refusal = why_not_shared(offers, native.MOST_RANKS if native is not None else len(offers))
    if not refusal:

        def open_group(opening: Opening) -> Any:
            geometry = opening.memory.geometry
            return native.create(
                opening.memory.descriptor,
                opening.rank,
                opening.processes,
                geometry.slot_bytes,
                geometry.ring_bytes,
                int(timeout.total_seconds() * 1000),
                opening.has_spare_cores,
            )

        joined = rendezvous.join(offers, native.bytes, open_group)
        if joined.group is not None:
            return joined.group
        refusal = joined.refusal
    return gloo_instead(store, rank, size, timeout, refusal)


def _native() -> tuple[Any, str]:
    try:
        return load_backend(), ""
    except (AcclimateError, OSError, ImportError) as error:
        return None, str(error)
