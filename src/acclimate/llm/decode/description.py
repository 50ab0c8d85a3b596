"""Describes one step of a decoder as data: its weights, their order, and its constants.

A description is derived from a recorded run of a loaded model (``derive``), and used only if its results
equal the model's (``proof``). It refers to the model's own modules and tensors; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from acclimate.llm.split.collectives import Ranks


class NotRepresentedError(Exception):
    """A description cannot express a model; the message names the reason."""


class PositionFunction(Protocol):
    """Numbers that depend on a token's position."""

    def __call__(self, positions: Tensor) -> Tensor:
        """Returns positions x numbers."""


@dataclass(frozen=True)
class Norm:
    """A normalization of the last dimension."""

    kind: Literal["rms", "layer"]
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    adds_one: bool
    """Whether the factor is one more than the weight."""
    rounds_first: bool
    """Whether the normalized values are rounded to the model's dtype before they are multiplied."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the normalized values, in the dtype of ``x``."""
        y = x.float()
        if self.kind == "layer":
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        if self.rounds_first:
            y = y.to(x.dtype)
        if self.weight is not None:
            weight = self.weight if self.rounds_first else self.weight.float()
            y = y * (weight + 1 if self.adds_one else weight)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.to(x.dtype)


@dataclass(frozen=True)
class Part:
    """Some columns of a linear module's output."""

    module: nn.Module
    first: int
    count: int


@dataclass(frozen=True)
class Product:
    """Columns of linear modules with the same input, one part after the other."""

    parts: tuple[Part, ...]

    @property
    def width(self) -> int:
        """The number of columns."""
        return sum(part.count for part in self.parts)

    def __call__(self, x: Tensor, memory: dict[int, Tensor] | None = None) -> Tensor:
        """Returns the columns; ``memory`` keeps outputs for other products with this input."""
        memory = {} if memory is None else memory
        for part in self.parts:
            if id(part.module) not in memory:
                memory[id(part.module)] = part.module(x)
        found = [memory[id(p.module)].narrow(-1, p.first, p.count) for p in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found, -1)


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines by position, computed by the model's own operators."""

    cos: PositionFunction
    sin: PositionFunction
    width: int
    """The number of elements that are rotated."""

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines for each pair of elements: positions x width / 2 each."""
        return self.cos(positions), self.sin(positions)


@dataclass(frozen=True)
class Rotary:
    """A rotary position embedding of queries and keys."""

    table: int
    """The index in ``Decoder.tables``."""
    width: int
    """The number of leading elements of a head that are rotated."""
    interleaved: bool
    """Whether the elements of a pair are side by side; else they are half a width apart."""
    rounds_products: bool
    """Whether each product is rounded to the model's dtype before they are added."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates heads (... x head size); ``cos`` and ``sin`` have a value for each pair."""
        turned = x[..., : self.width]
        if not self.rounds_products:
            turned, cos, sin = turned.float(), cos.float(), sin.float()
        if self.interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
        else:
            a, b = turned.chunk(2, -1)
        first, second = a * cos + -b * sin, b * cos + a * sin
        found = (
            torch.stack((first, second), -1).flatten(-2)
            if self.interleaved
            else torch.cat((first, second), -1)
        )
        return torch.cat((found.to(x.dtype), x[..., self.width :]), -1)


@dataclass(frozen=True)
class Attention:
    """Attention of one layer, from its normalized input to its output projection."""

    query: Product
    key: Product
    value: Product
    query_norm: Norm | None
    key_norm: Norm | None
    norm_is_per_head: bool
    rotary: Rotary | None
    rotary_first: bool
    """Whether queries and keys are rotated before they are normalized."""
    query_factors: int | None
    """The index in ``Decoder.factors`` of the numbers that rotated queries are multiplied by."""
    heads: int
    key_heads: int
    head_size: int
    value_size: int
    scale: float
    window: int | None
    """The most keys a query sees, its own included; ``None``: all."""
    softcap: float | None
    sinks: Tensor | None
    output: nn.Module


@dataclass(frozen=True)
class Mlp:
    """An MLP: ``down(activation(gate) * up)``, or ``down(activation(up))``."""

    gate: Product | None
    up: Product
    activation: str
    down: nn.Module


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    attention_norm: Norm | None
    attention: Attention
    attention_post_norm: Norm | None
    attention_multiplier: float
    mlp_norm: Norm | None
    mlp: Mlp
    mlp_post_norm: Norm | None
    mlp_multiplier: float
    parallel: bool
    """Whether the MLP starts from the layer's input, as attention does; else from attention's result."""
    adds_branches_first: bool
    """In a parallel layer: whether the branches are added to each other, then to the layer's input."""
    mlp_shares_norm: bool
    """In a parallel layer: whether the MLP has attention's normalized input."""


@dataclass(frozen=True)
class SharedTable:
    """An embedding whose rows the ranks share."""

    own: range
    """The tokens whose rows this rank has."""
    tokens: int
    """The number of tokens of all ranks."""


@dataclass(frozen=True)
class Share:
    """One rank's part of a split model."""

    ranks: Ranks
    summed: frozenset[nn.Module]
    """Linear modules whose outputs are summed over the ranks."""
    table: SharedTable | None
    """The tokens' embedding; ``None``: each rank has all of it."""
    head_widths: tuple[int, ...] | None
    """The number of columns of the output head on each rank; ``None``: each rank has all."""


@dataclass(frozen=True)
class Decoder:
    """A whole decoder, or one rank's part of it."""

    embedding: nn.Module
    embedding_multiplier: float
    positions: Tensor | None
    """The weight of a learned position embedding."""
    position_offset: int
    tables: tuple[RotaryTable, ...]
    factors: tuple[PositionFunction, ...]
    """Functions that give one number for each position, which queries are multiplied by."""
    layers: tuple[Layer, ...]
    norm: Norm | None
    head: nn.Module
    logit_multiplier: float
    logit_softcap: float | None
    dtype: torch.dtype
    hidden: int
    vocabulary: int
    share: Share | None
    """This rank's part of the decoder; ``None``: the decoder is whole."""
    limit: int | None
    """The most tokens of a text for which the model computes this; ``None``: any number."""
    constants: tuple[Tensor, ...]
    """The model's tensors of one element, whose values stand in the description as numbers."""


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
    "relu2": lambda x: nn.functional.relu(x).square(),
}
"""The activations that a description can express."""
