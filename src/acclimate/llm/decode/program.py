"""A captured program: the values that one call of a model computes, and the operators that compute them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Role:
    """Where a value comes from: bits that its operands' bits are joined into."""

    TOKENS, POSITIONS, MASK, WEIGHTS, CACHE = 1, 2, 4, 8, 16


@dataclass(eq=False)
class Value:
    """A tensor of a captured program."""

    op: str
    """The operator's name without namespace and overload; ``input`` and ``constant`` are where it starts."""
    overload: Any
    args: tuple[Any, ...]
    """Positional arguments, with values in place of tensors, and sympy expressions of symbolic sizes."""
    kwargs: dict[str, Any]
    output: int
    """Which of the operator's results it is."""
    shape: tuple[Any, ...]
    dtype: torch.dtype
    roles: int
    tensor: Tensor | None = None
    """A constant's tensor: the model's own parameter or buffer."""

    def __repr__(self) -> str:
        return f"{self.op}{list(self.shape)}"


@dataclass
class Program:
    """What one call of the model computes."""

    logits: Value
    batch: Any
    length: Any
    """The number of tokens of the call."""
    past: Any
    """The number of earlier tokens."""
    modules: list[nn.Module]
    """The linear modules and packed embeddings, by the number that the operators carry."""
    limit: int | None
    """The most tokens, with earlier ones, for which the model computes this program; ``None``: any number."""
    constants: tuple[Tensor, ...]
    """The model's tensors of one element that it uses."""
    replaced: frozenset[int]
    """The identities of the model's buffers that it writes before it reads them."""
    states: dict[int, Value]
    """What becomes of the inputs of a convolution that it reads from a layer's cache."""
    recurrent: dict[int, Value]
    """What becomes of a layer's recurrent state."""
