"""A Triton kernel; imported only where an accelerator says that Triton works, as few machines have it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 256


@triton.jit  # type: ignore[untyped-decorator]
def _add_one(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    tl.store(target + places, tl.load(source + places, mask=inside) + 1, mask=inside)


def add_one(values: torch.Tensor) -> torch.Tensor:
    """``values + 1``, computed by a Triton kernel on their device."""
    result = torch.empty_like(values)
    _add_one[(triton.cdiv(values.numel(), _BLOCK),)](values, result, values.numel(), BLOCK=_BLOCK)
    return result
