"""Checks of the op for language models: products with dense and quantised weights."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import NotOfferedError, distance, require, short
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import supported
from acclimate_conformance.checks.ops.builders import builder_of

_SHAPES = ((37, 96), (16, 64), (131, 256), (19, 44))
"""Rows and columns of weights, mostly no multiple of those that a kernel takes together."""
_ROWS = (1, 2, 3, 5, 8, 13, 18, 33)
"""From one to more than any kernel for few rows takes; the numbers between go different ways."""
_ALLOWED = {torch.float32: 4e-2, torch.float16: 4e-2, torch.bfloat16: 6e-2}
"""Inputs of quantised weights may be rounded to 8 bits."""


@check(
    "create_op_builder", "op_builders",
    promise="PackedWeight multiplies any number of rows by weights of any format, with or without a bias.",
    timeout_s=600, once=True,
)  # fmt: skip
def packed_weights_multiply(accelerator: Accelerator) -> None:
    name = "InferenceBuilder"
    if name not in accelerator.op_builders:
        raise NotOfferedError(f"it has no {name}")
    if not builder_of(accelerator, name).is_compatible(verbose=False):
        raise NotOfferedError(f"its {name} cannot be built here")
    kind = getattr(builder_of(accelerator, name).load(), "PackedWeight", None)
    if kind is None:
        raise NotOfferedError(f"the module of its {name} has no PackedWeight")
    for n, k in _SHAPES:
        generator = torch.Generator().manual_seed(n)
        weight, bias = torch.randn(n, k, generator=generator), torch.randn(n, generator=generator) * 8
        for made in ("dense", "int8", "int4"):
            packed = kind.dense(weight) if made == "dense" else kind.quantize(weight, made)
            packed = packed.to(accelerator.current_device_name())
            _require_products(accelerator, packed, bias, f"PackedWeight.linear() of {made} [{n}, {k}]")
            if hasattr(packed, "rows"):
                _require_rows(accelerator, packed, f"PackedWeight.rows() of {made} [{n}, {k}]")


def _require_rows(accelerator: Accelerator, packed: Any, what: str) -> None:
    """Rows are found by numbers of any shape and layout."""
    values = packed.dequantize().cpu()
    numbers = (torch.arange(14) * 5 % len(values)).view(2, 7).to(accelerator.current_device_name())
    for how, ids in {
        "": numbers, "transposed ": numbers.t(), "every second of some ": numbers[:, ::2],
        "no ": numbers[:0], "repeated ": numbers[:, :1].expand(2, 3), "int32 ": numbers.int(),
    }.items():  # fmt: skip
        found, wanted = packed.rows(ids).cpu(), values[ids.cpu().long()]
        require(
            found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-5, atol=1e-6),
            f"{what} by {how}numbers gives others than dequantize()",
        )


def _require_products(accelerator: Accelerator, packed: Any, bias: torch.Tensor, what: str) -> None:
    device = accelerator.current_device_name()
    values = packed.dequantize().cpu().double()
    n, k = values.shape
    for dtype in supported(accelerator):
        if dtype not in _ALLOWED:
            continue
        for rows in _ROWS if k % 32 == 0 else _ROWS[1::3]:
            x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).to(dtype)
            for how, given in {"no bias": None, "a bias": bias}.items():
                add = None if given is None else given.to(dtype)
                found = packed.linear(x.to(device), None if add is None else add.to(device))
                wanted = functional.linear(x.double(), values, None if add is None else add.double())
                apart = distance(found, wanted)
                require(
                    found.dtype == dtype and apart <= _ALLOWED[dtype],
                    f"{what} with {rows} rows in {short(dtype)} and {how} is {short(found.dtype)} and off by "
                    f"{apart:.1e}",
                )
            if hasattr(packed, "top") and rows in (1, 5):
                _require_largest(packed, x, functional.linear(x.double(), values), device, what)
            if rows == 33:  # other strides, and leading dimensions
                wanted = functional.linear(x.double(), values)
                wide = torch.zeros(rows, 2 * k, dtype=dtype, device=device)[:, ::2].copy_(x)
                for shaped in (wide, x.to(device).view(3, rows // 3, k)):
                    apart = distance(packed.linear(shaped).reshape(rows, n), wanted)
                    require(apart <= _ALLOWED[dtype], f"{what} of a strided tensor is off by {apart:.1e}")


def _require_largest(packed: Any, x: torch.Tensor, products: torch.Tensor, device: str, what: str) -> None:
    for count in (1, 2, 3, 7):
        found, places = (t.cpu() for t in packed.top(x.to(device), count))
        told = f"{what.replace('linear', 'top')} with a count of {count}"
        require(bool((found.diff() <= 0).all()), f"{told} does not begin with the largest")
        allowed = 2 * _ALLOWED[x.dtype]
        apart = distance(found, products.topk(count).values)
        require(apart <= allowed, f"{told} is off by {apart:.1e}")
        apart = distance(products.gather(1, places), found)
        require(apart <= allowed, f"{told} names other places than those of its values")
        distinct = all(len(row.unique()) == count for row in places)
        require(distinct, f"{told} names a place twice")
