"""``simccl``: torch's collectives on sim tensors.

Sim tensors are in host memory, so gloo moves their bytes; the library gives gloo host tensors that share the
memory (``csrc/collectives.cpp``).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

NAME = "simccl"


def register(name: str, device_type: str) -> None:
    """Registers the backend with ``torch.distributed`` by a name, for tensors on the device and the host."""
    if dist.is_available() and dist.is_gloo_available():
        dist.Backend.register_backend(name, _create, devices=[device_type, "cpu"])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)
