"""The first use of a kernel in Triton: it must compile for the device, and give torch's numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

logger = logging.getLogger("acclimate.llm")

_LIMIT = 1e-3
"""The largest accepted difference, relative to the largest number: sums are in another order."""


def gives(expected: Tensor, compute: Callable[[], Tensor], what: str) -> bool:
    """Whether a kernel gives these numbers; if not, logs that torch does its work."""
    try:
        found = compute().cpu()
    except Exception as error:  # noqa: BLE001  # a compiler's errors are of any kind
        logger.warning("%s: torch computes this, since Triton cannot: %s", what, error)
        return False
    gap = float((found - expected).abs().max() / expected.abs().max())
    if gap <= _LIMIT:
        return True
    logger.warning("%s: torch computes this, since Triton's numbers are off by %.2g", what, gap)
    return False
