"""The store through which the ranks of DeepSpeed's communication ops find each other."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from acclimate.errors import InvalidEnvironmentError, InvalidRankError


def require_rank(size: int, rank: int) -> None:
    """Checks that ``rank`` is a rank of a group of ``size`` ranks.

    Raises:
        InvalidRankError: ``rank`` is not from 0 to ``size`` - 1.
    """
    if not 0 <= rank < size:
        raise InvalidRankError(f"rank is {rank}, but must be from 0 to {size - 1}, as size is {size}.")


def store_for(op: str, number: int, size: int, rank: int) -> Any:
    """Returns the store of one group of an op, of which this process created ``number`` groups before."""
    return distributed_c10d.PrefixStore(f"acclimate/{op}/{number}", _shared(size, rank))


def _shared(size: int, rank: int) -> Any:
    if dist.is_initialized() and dist.get_world_size() == size:
        return distributed_c10d._get_default_store()
    if size > 1 and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        raise InvalidEnvironmentError(
            "initialize() does not know where the ranks find each other. Call acclimate.init_distributed() "
            "first, or set MASTER_ADDR and MASTER_PORT."
        )
    if size == 1:
        return torch._C._distributed_c10d.HashStore()
    store, _, _ = next(rendezvous("env://", rank, size))
    return store
