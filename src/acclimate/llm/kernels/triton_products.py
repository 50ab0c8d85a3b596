"""Products of few rows with up to four dense weights, in one kernel of Triton.

A step of a small model is bound by kernels of a few microseconds, and libraries choose theirs for larger
matrices: those of queries, keys and values take four times as long in three calls as here.
Imported only where Triton works.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from acclimate.llm.kernels.triton_check import gives

MOST_WEIGHTS = 4
"""The most weights of one kernel."""
_MOST_ROWS = 16
"""The rows that a product of matrices has at least; with more, libraries are as fast."""


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    x, weight0, weight1, weight2, weight3, bias0, bias1, bias2, bias3, result,
    rows, k, n0, n1, n2, n3, x_row, result_row,
    BIASES: tl.constexpr, IS_ROW: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Multiplies the input by some rows of one weight; results stand side by side."""
    block = tl.program_id(0)
    end0 = tl.cdiv(n0, OUTPUTS)
    end1 = end0 + tl.cdiv(n1, OUTPUTS)
    end2 = end1 + tl.cdiv(n2, OUTPUTS)
    weight, bias, has_bias, n, first, begin = weight0, bias0, BIASES & 1, n0, block, 0
    if block >= end2:
        weight, bias, has_bias, n, first, begin = weight3, bias3, BIASES & 8, n3, block - end2, n0 + n1 + n2
    elif block >= end1:
        weight, bias, has_bias, n, first, begin = weight2, bias2, BIASES & 4, n2, block - end1, n0 + n1
    elif block >= end0:
        weight, bias, has_bias, n, first, begin = weight1, bias1, BIASES & 2, n1, block - end0, n0
    output, column = first * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, COLUMNS)
    inside = output < n
    at = weight + output.to(tl.int64)[:, None] * k + column[None, :]
    row = tl.arange(0, 1 if IS_ROW else 16)
    total = tl.zeros((OUTPUTS, COLUMNS) if IS_ROW else (16, OUTPUTS), tl.float32)
    for start in tl.range(0, k, COLUMNS, num_stages=STAGES):
        here = start + column < k
        numbers = tl.load(at + start, mask=inside[:, None] & here[None, :], other=0)
        if IS_ROW:
            given = tl.load(x + start + column, mask=here, other=0).to(tl.float32)
            total += numbers.to(tl.float32) * given[None, :]
        else:
            place = x + row[:, None] * x_row + start + column[None, :]
            given = tl.load(place, mask=(row < rows)[:, None] & here[None, :], other=0)
            total = tl.dot(given, tl.trans(numbers), total, input_precision="ieee")
    found = tl.sum(total, 1)[None, :] if IS_ROW else total
    if BIASES:
        found += tl.load(bias + output, mask=inside & (has_bias != 0), other=0).to(tl.float32)[None, :]
    place = result + row[:, None] * result_row + begin + output[None, :]
    tl.store(place, found.to(result.dtype.element_ty), mask=(row < rows)[:, None] & inside[None, :])


def can_multiply(x: Tensor, modules: Sequence[nn.Module]) -> bool:
    """Whether :func:`products` computes the modules' results, and sooner than torch.

    Args:
        x: rows x k, in one of ``DENSE_DTYPES``.
        modules: modules with this input.
    """
    if x.stride(-1) != 1 or not 0 < len(modules) <= MOST_WEIGHTS:
        return False
    # With more rows than one, a library's product with one weight is as fast.
    if not 0 < len(x) <= (1 if len(modules) == 1 else _MOST_ROWS):
        return False
    return all(_is_plain(module, x) for module in modules)


def _is_plain(module: nn.Module, x: Tensor) -> bool:
    """Whether a module is torch's own ``Linear``, for an input, and nothing has been added to it."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    weight, bias = module.weight, module.bias
    if type(weight) is not nn.Parameter or not weight.is_contiguous() or weight.shape[1] != x.shape[1]:
        return False
    if bias is not None and (type(bias) is not nn.Parameter or not bias.is_contiguous()):
        return False
    return all(t.dtype == x.dtype and t.device == x.device for t in (weight, bias) if t is not None)


def products(x: Tensor, modules: Sequence[nn.Module]) -> list[Tensor]:
    """Returns what linear modules give, rows x outputs; a sum is rounded once, after its bias is added.

    Args:
        x: rows x k.
        modules: which ``can_multiply`` allows with ``x``.
    """
    rows, k = x.shape
    weights: list[Tensor] = [module.weight for module in modules]  # type: ignore[misc]
    biases: list[Tensor | None] = [module.bias for module in modules]  # type: ignore[misc]
    counts = [len(weight) for weight in weights]
    absent = MOST_WEIGHTS - len(modules)
    shape = _shape(rows, k, x.dtype)
    result = x.new_empty(rows, sum(counts))
    blocks = sum(triton.cdiv(count, shape["OUTPUTS"]) for count in counts)
    _kernel[(blocks,)](
        x, *weights, *[x] * absent, *[x if bias is None else bias for bias in biases], *[x] * absent, result,
        rows, k, *counts, *[0] * absent, x.stride(0), result.stride(0),
        BIASES=sum((bias is not None) << place for place, bias in enumerate(biases)), IS_ROW=rows == 1,
        **shape,
    )  # fmt: skip
    return list(result.split(counts, -1))


def _shape(rows: int, k: int, dtype: torch.dtype) -> dict[str, int]:
    """Returns how many outputs and columns a program has at a time, and its warps.

    Of eight for one row and five for more, these were the fastest in bfloat16 on an H200, or nearly so, for
    seven products of models of 0.6 and 8 billion parameters.
    """
    if rows == 1:
        return {"OUTPUTS": 4, "COLUMNS": 512 if k <= 1024 else 1024, "STAGES": 3, "num_warps": 4}
    # In 99 KiB of shared memory, which is what most GPUs have.
    return {"OUTPUTS": 32, "COLUMNS": 512 // dtype.itemsize, "STAGES": 3, "num_warps": 4}


@functools.cache
def is_right(device_type: str, dtype: torch.dtype) -> bool:
    """Whether the kernel gives what torch computes, on a device and in a dtype."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, 100, generator=random).to(dtype)
    modules = [nn.Linear(100, n, bias=n == 37, dtype=dtype) for n in (37, 16)]
    with torch.no_grad():
        for parameter in (p for module in modules for p in module.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=random))
        expected = torch.cat([module(x) for module in modules], -1)

        def compute() -> Tensor:
            given: Any = x.to(device_type)
            on_device = [module.to(device_type) for module in modules]
            found = [torch.cat(products(part, on_device), -1) for part in (given[:1], given)]
            return torch.cat((found[0], found[1][1:]))

        return gives(expected, compute, f"products in {dtype} on {device_type}")
