"""The first use of a kernel in Triton: it must compile for the device, and give torch's numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger("acclimate.llm")

_LIMITS = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""By dtype, the largest accepted difference, relative to the largest number: sums are in another order."""


def gives(expected: Tensor, compute: Callable[[], Tensor], what: str) -> bool:
    """Whether a kernel gives these numbers in their dtype; if not, logs that torch does its work."""
    try:
        found = compute().cpu()
    except Exception as error:  # noqa: BLE001  # a compiler's errors are of any kind
        logger.warning("%s: torch computes this, since Triton cannot: %s", what, error)
        return False
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        logger.warning("%s: torch computes this, since Triton's result has another shape or dtype", what)
        return False
    gap = float((found.float() - expected.float()).abs().max() / expected.abs().max())
    if gap <= _LIMITS[expected.dtype]:
        return True
    logger.warning("%s: torch computes this, since Triton's numbers are off by %.2g", what, gap)
    return False
