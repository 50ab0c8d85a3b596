"""``simccl``: torch's collectives on sim tensors.

Each process holds its devices in host memory, so gloo moves the bytes; the library hands it host tensors over
them (``csrc/collectives.cpp``).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

NAME = "simccl"


def register() -> None:
    """Makes ``simccl`` known to ``torch.distributed``, for tensors on sim and on the host."""
    if dist.is_available() and dist.is_gloo_available():
        dist.Backend.register_backend(NAME, _create, devices=["sim", "cpu"])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)
