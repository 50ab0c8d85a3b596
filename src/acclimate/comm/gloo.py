"""The group that ranks get which cannot share memory."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_logger = logging.getLogger("acclimate")


def gloo_instead(store: Any, rank: int, size: int, timeout: timedelta, refusal: str) -> Any:
    """A group of gloo; rank 0 warns of it.

    Args:
        store: of the group alone.
        rank: this one.
        size: of the group.
        timeout: of each collective.
        refusal: why the ranks cannot share memory.
    """
    if rank == 0:
        _logger.warning(
            "Collectives of this group of %d ranks go through gloo, with the same results but slower, as the "
            "ranks cannot share memory: %s.",
            size,
            refusal,
        )
    return dist.ProcessGroupGloo(store, rank, size, timeout)
