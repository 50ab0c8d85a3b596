"""Linear modules and embeddings: transformers' own, and those with a packed weight."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.llm.decode.description import NotRepresentedError, Share
from acclimate.llm.split.tracing.linear_modules import linear_dims


def packed_weight(module: nn.Module) -> Any:
    """Returns a module's quantised weight, or ``None``."""
    packed = getattr(module, "packed", None)
    return packed if getattr(packed, "number", 0) else None


def stacks_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of experts that a module holds, by name."""
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.dim() == 3:
            yield name, parameter
    yield from getattr(module, "stand_ins", {}).items()


def packed_stacks(module: nn.Module) -> dict[str, Any]:
    """Returns the quantised weights of experts that a module holds, by the name that each has there."""
    found: dict[str, Any] = vars(module).get("packed_stacks", {})
    return found


def bias_of(module: nn.Module) -> Tensor | None:
    """Returns a linear module's bias, which need not be a parameter."""
    bias = getattr(module, "bias", None)
    return bias if isinstance(bias, Tensor) else None


def with_bias_as_parameter(module: nn.Module) -> nn.Module:
    """Returns a linear module, or a copy whose bias is a parameter; they share memory.

    In a split model, zeros in place of another rank's bias are a buffer if a forward needs them (GPT-2's).
    """
    bias = bias_of(module)
    if bias is None or "bias" in module._parameters:
        return module
    made = copy.copy(module)
    vars(made).pop("bias", None)
    made._buffers = {name: buffer for name, buffer in module._buffers.items() if name != "bias"}
    made._parameters = {**module._parameters, "bias": nn.Parameter(bias, requires_grad=False)}
    return made


def rows_of(module: nn.Module) -> Tensor:
    """Returns a linear module's weight as outputs x inputs; shares its memory, also if it is stored turned
    (GPT-2's)."""
    parameter = module.weight
    if not isinstance(parameter, Tensor):
        raise NotRepresentedError("a linear module has no tensor as its weight")
    is_turned = not isinstance(module, nn.Linear) and linear_dims(with_bias_as_parameter(module)) == (1, 0)
    return parameter.detach().t() if is_turned else parameter.detach()


def embedding_rows(table: nn.Module, tokens: Tensor, share: Share | None = None) -> Tensor:
    """Returns the rows of an embedding's weight for tokens, without the module's other operations.

    If ranks share the rows, they sum their results, so all ranks must make the same call.
    """
    if share is not None and share.table is not None:
        if bool(((tokens < 0) | (tokens >= share.table.tokens)).any()):
            raise IndexError("index out of range in self")  # torch's message for an embedding
        own = tokens - share.table.own.start
        outside = (own < 0) | (own >= len(share.table.own))
        found = embedding_rows(table, own.masked_fill(outside, 0))
        return share.ranks.all_reduce(found.masked_fill(outside[..., None], 0.0))
    packed = packed_weight(table)
    if packed is not None:
        rows: Tensor = packed.rows(tokens, table.weight.dtype)
        return rows
    weight = getattr(table, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise NotRepresentedError("the tokens' embedding is not one table")
    return torch.nn.functional.embedding(tokens, weight.detach())
