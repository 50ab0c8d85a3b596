"""Changes of the weights of a model that other tests use too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def changed(*weights: torch.Tensor) -> Iterator[None]:
    """Within it these weights may change; at its end they have their values again."""
    before = [weight.detach().clone() for weight in weights]
    try:
        yield
    finally:
        for weight, values in zip(weights, before, strict=True):
            weight.data.copy_(values)
