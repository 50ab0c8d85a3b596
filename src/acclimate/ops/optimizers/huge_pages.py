"""Allocates the optimizers' state on huge pages."""

from __future__ import annotations

import torch
from torch import Tensor

from acclimate.host.huge_pages import request
from acclimate.ops.optimizers.shards import local


def empty_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocates an uninitialised tensor of the same shape and layout, on huge pages if it is large."""
    result = torch.empty_like(tensor, dtype=dtype, memory_format=torch.preserve_format)
    request(local(result))
    return result
