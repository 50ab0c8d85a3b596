"""One rank's part of parameters that are sharded over ranks (DTensors, as FSDP2 makes them).

An element-wise update of a shard gives the same values as an update of the whole tensor.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing torch's module for DTensors, which is slow."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor; any other tensor unchanged."""
    if is_sharded(tensor):
        shard: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return shard
    return tensor


def spread_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Redistributes a DTensor to another's placements; returns any other tensor unchanged."""
    if is_sharded(tensor) and is_sharded(other):
        theirs: Any = other
        if tensor.placements != theirs.placements:  # type: ignore[attr-defined]
            spread: Tensor = tensor.redistribute(placements=theirs.placements)  # type: ignore[attr-defined]
            return spread
    return tensor
