"""Finds the modules that compute the angles of rotary embeddings, and how to call them elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from acclimate.inference.decode.description import POSITIONS, AnglesCall, RotaryTable
from acclimate.inference.decode.recording import Call


def find_tables(calls: Sequence[Call], length: int) -> Iterator[RotaryTable]:
    """Yields the modules that computed cosines and sines, if these depend only on the position."""
    for call in calls:
        pair = call.result
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(e, Tensor) for e in pair)):
            continue
        cos, sin = pair
        if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[:2] != (1, length):
            continue
        size = cos.double().square() + sin.double().square()
        if not (size - size.mean()).abs().max() <= 0.05 * size.mean() or sin[:, 0].any():
            continue
        arguments = _with_positions(call, length)
        if arguments is None:
            continue
        for width in {cos.shape[-1], 2 * cos.shape[-1]}:
            table = RotaryTable(call.module, arguments, width)
            if not _is_fixed(table, cos, sin):
                continue
            yield table


def _with_positions(call: Call, length: int) -> AnglesCall | None:
    """Returns how to call a module of angles with other positions."""

    def is_positions(value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and not value.is_floating_point()
            and tuple(value.shape) == (1, length)
            and bool((value[0] == torch.arange(length, device=value.device)).all())
        )

    if sum(is_positions(value) for value in (*call.args, *call.kwargs.values())) != 1:
        return None
    return AnglesCall(
        tuple(POSITIONS if is_positions(value) else value for value in call.args),
        {name: POSITIONS if is_positions(value) else value for name, value in call.kwargs.items()},
    )


def _is_fixed(table: RotaryTable, cos: Tensor, sin: Tensor) -> bool:
    """Whether an angle depends only on its position, not on the largest position of the call."""
    length = cos.shape[1]
    far = torch.cat((torch.arange(length), torch.tensor([1 << 12, 1 << 16, 1 << 22])))
    args, kwargs = table.arguments(far[None].to(cos.device))
    with torch.no_grad():
        others = table.module(*args, **kwargs)
    return all(torch.equal(o[:, :length], own) for o, own in zip(others, (cos, sin), strict=True))
