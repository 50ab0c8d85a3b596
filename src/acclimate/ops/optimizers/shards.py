"""Parameters that are spread over ranks (DTensors, as FSDP2 makes them), seen from one rank.

An update that treats each element by itself is the same on a shard as on the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; told without importing torch's module for them, which takes long."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard of a DTensor, all of any other."""
    if is_sharded(tensor):
        shard: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return shard
    return tensor


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """:func:`local` of each."""
    return [local(tensor) for tensor in tensors]


def spread_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A DTensor with the placements of another; any other tensor as it is."""
    if is_sharded(tensor) and is_sharded(other):
        theirs: Any = other
        if tensor.placements != theirs.placements:  # type: ignore[attr-defined]
            spread: Tensor = tensor.redistribute(placements=theirs.placements)  # type: ignore[attr-defined]
            return spread
    return tensor
