"""Products with quantised weights in Triton, for the devices that it compiles for.

Plain torch writes all values of a weight before it multiplies them, which takes longer than a product in
bfloat16. This kernel reads the bytes as they are stored; :mod:`acclimate.llm.kernels.formats` says how.
Imported only where Triton works, as few machines have it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from acclimate.llm.kernels import layout, operators
from acclimate.llm.kernels.formats import BLOCK_COLUMNS, GROUP_ROWS, format_of_number
from acclimate.llm.kernels.triton_check import gives

_MOST_ROWS = 16
"""The most input rows; for more, unpacking a weight once is cheaper than reading it for each of them."""
_TYPES = {torch.float32: "f32", torch.float16: "f16", torch.uint8: "u8", torch.int8: "i8"}


# Half of a block is 16 columns, whose codes of 16 rows are 256 bytes: 4 quads x 16 rows x 4 columns.
@triton.jit  # type: ignore[untyped-decorator]
def _field(begin, halves, inside, TYPE: tl.constexpr, SHARED: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Returns a field's number for each half and row; ``SHARED`` halves have one in common, 0: all."""
    if TYPE == "f32":
        numbers = begin.to(tl.pointer_type(tl.float32))
    elif TYPE == "f16":
        numbers = begin.to(tl.pointer_type(tl.float16))
    elif TYPE == "i8":
        numbers = begin.to(tl.pointer_type(tl.int8))
    else:
        numbers = begin
    place = halves * 0 if SHARED == 0 else halves // SHARED
    found = tl.load(numbers + place[:, None] * 16 + tl.arange(0, 16)[None, :], mask=inside[:, None], other=0)
    return found.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _sums(values, HALVES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Returns the sum over the columns of each half, for each row."""
    return tl.sum(tl.sum(tl.reshape(values, (HALVES, 4, 16, 4)), 3), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    x, data, table, bias, chosen, result, n, k, groups, blocks, group_bytes,
    codes_begin, scale_begin, low_scale_begin, block_begin, low_begin,
    BITS: tl.constexpr, OFFSET: tl.constexpr, HAS_TABLE: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr, HAS_EXPERTS: tl.constexpr,  # noqa: N803
    SCALE: tl.constexpr, SCALE_SHARED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SHARED: tl.constexpr,  # noqa: N803
    LOW: tl.constexpr, TOGETHER: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Multiplies one input row by 16 rows of a weight, or of the weight of its expert."""
    number, input_row = tl.program_id(0), tl.program_id(1)
    group = data + number.to(tl.int64) * group_bytes
    if HAS_EXPERTS:
        group += tl.load(chosen + input_row).to(tl.int64) * groups * group_bytes
    x += input_row * k
    byte = tl.arange(0, 256)
    column = byte // 64 * 4 + byte % 4
    total = tl.zeros((TOGETHER, 16), tl.float32)
    for first in range(0, blocks, TOGETHER):
        block = first + tl.arange(0, TOGETHER)
        inside = block < blocks
        begin = group + codes_begin + block[:, None] * (64 * BITS)
        lower = tl.load(begin + byte[None, :], mask=inside[:, None], other=0)
        if BITS == 8:
            upper = tl.load(begin + 256 + byte[None, :], mask=inside[:, None], other=0)
        if BITS == 5:
            fifth = tl.load(begin + 256 + byte[None, :] % 64, mask=inside[:, None], other=0).to(tl.int32)
        for half in tl.static_range(2):
            if BITS == 8:
                code = (lower if half == 0 else upper).to(tl.int32)
            else:
                code = (lower.to(tl.int32) >> 4 * half) & 15
            if BITS == 5:
                code += ((fifth >> byte[None, :] // 64 + 4 * half) & 1) << 4
            if BITS == 6:
                high = tl.load(begin + 256 + 64 * half + byte[None, :] % 64, mask=inside[:, None], other=0)
                code += ((high.to(tl.int32) >> byte[None, :] // 64 * 2) & 3) << 4
            value = tl.load(table + code) - OFFSET if HAS_TABLE else (code - OFFSET).to(tl.float32)
            place = block[:, None] * 32 + half * 16 + column[None, :]
            given = tl.load(x + place, mask=place < k, other=0).to(tl.float32)
            halves = block * 2 + half
            if SCALE == "exponent":
                exponent = _field(group + scale_begin, halves, inside, "u8", SCALE_SHARED).to(tl.int32)
                power = ((exponent - 1) << 23).to(tl.float32, bitcast=True)
                scale = tl.where(exponent > 1, power, 0.0)  # the others would be denormal
            else:
                scale = _field(group + scale_begin, halves, inside, SCALE, SCALE_SHARED)
            factor = scale
            if BLOCK != "":
                factor = scale * _field(group + block_begin, halves, inside, BLOCK, BLOCK_SHARED)
            total += factor * _sums(value * given, TOGETHER)
            if LOW == "low":
                total += _field(group + low_begin, halves, inside, "f16", 2) * _sums(given, TOGETHER)
            if LOW == "zero":
                zero = _field(group + low_begin, halves, inside, "i8", 2)
                total -= scale * zero * _sums(given, TOGETHER)
            if LOW == "block_low":
                low_scale = _field(group + low_scale_begin, halves, inside, SCALE, SCALE_SHARED)
                block_low = _field(group + low_begin, halves, inside, "u8", 2)
                total -= low_scale * block_low * _sums(given, TOGETHER)
    row = number * 16 + tl.arange(0, 16)
    found = tl.sum(total, 0)
    if HAS_BIAS:
        found += tl.load(bias + row, mask=row < n, other=0).to(tl.float32)
    tl.store(result + input_row * n + row, found.to(result.dtype.element_ty), mask=row < n)


@functools.cache
def _constants(number: int) -> dict[str, Any]:
    """The kernel's constants for a format."""
    kind = format_of_number(number)
    by_name = {field.name: field for field in kind.fields}
    scale, block = by_name.get("scale") or by_name["exponent"], by_name.get("block_scale")
    return {
        "BITS": kind.bits,
        "OFFSET": kind.offset,
        "HAS_TABLE": bool(kind.codebook),
        "SCALE": "exponent" if scale.name == "exponent" else _TYPES[scale.dtype],
        "SCALE_SHARED": scale.columns // 16,
        "BLOCK": "" if block is None else _TYPES[block.dtype],
        "BLOCK_SHARED": 0 if block is None else block.columns // 16,
        "LOW": next((name for name in ("low", "zero", "block_low") if name in by_name), ""),
    }


@functools.cache
def _begins(number: int, k: int) -> tuple[int, int, int, int, int]:
    """Where a group's codes, scales, scales of lows, scales of blocks, and lows or zeros begin."""
    kind = format_of_number(number)
    begins, begin = {}, 0
    for field in kind.fields:
        begins[field.name] = begin
        begin += field.group_bytes(kind.padded(k))

    def of(*names: str) -> int:
        return next((begins[name] for name in names if name in begins), 0)

    return (
        begin, of("scale", "exponent"), of("low_scale"), of("block_scale"), of("low", "zero", "block_low")
    )  # fmt: skip


def linear(x: Tensor, data: Tensor, bias: Tensor | None, format_number: int, n: int, k: int) -> Tensor:
    """As the operator ``packed_linear``: few rows of a quantised weight in Triton, all else in torch."""
    rows = x.numel() // k if k else 0
    if format_number and n and 0 < rows <= _MOST_ROWS and _is_right(format_number, x.device.type):
        return _product(x, data, bias, None, format_number, n, k)
    return operators.linear(x, data, bias, format_number, n, k)


def experts(x: Tensor, data: Tensor, chosen: Tensor, format_number: int, n: int, k: int) -> Tensor:
    """As the operator ``packed_experts``."""
    if x.numel() and n and _is_right(format_number, x.device.type):
        return _product(x, data, None, chosen.contiguous(), format_number, n, k)
    return operators.experts(x, data, chosen, format_number, n, k)


def _product(
    x: Tensor, data: Tensor, bias: Tensor | None, chosen: Tensor | None, format_number: int, n: int, k: int
) -> Tensor:
    kind, groups = format_of_number(format_number), -(-n // GROUP_ROWS)
    x = x.contiguous()
    result = x.new_empty(*x.shape[:-1], n)
    table = layout.codebook(kind.codebook, x.device) if kind.codebook else x
    blocks = kind.padded(k) // BLOCK_COLUMNS
    # The fastest of 16 shapes on an H200.
    shape = {"TOGETHER": 32, "num_warps": 8} if blocks > 64 else {"TOGETHER": 16, "num_warps": 4}
    _kernel[(groups, x.numel() // k)](
        x, data, table, x if bias is None else bias.contiguous(), x if chosen is None else chosen, result,
        n, k, groups, blocks, data.shape[-1], *_begins(format_number, k),
        HAS_BIAS=bias is not None, HAS_EXPERTS=chosen is not None, **shape, **_constants(format_number),
    )  # fmt: skip
    return result


@functools.cache
def _is_right(format_number: int, device_type: str) -> bool:
    """Whether the kernel gives plain torch's results for a format."""
    kind, n, k = format_of_number(format_number), 2 * GROUP_ROWS, 2 * BLOCK_COLUMNS * 8
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, k, generator=random)
    codes = torch.randint(0, 1 << kind.bits, (n, k), dtype=torch.uint8, generator=random)
    fields = {
        field.name: torch.randint(1, 100, (n, field.parts(k)), generator=random).to(field.dtype)
        for field in kind.fields
    }
    data = layout.pack(layout.Parts(codes, fields), kind)
    expected = operators.linear(x, data, None, format_number, n, k)

    def compute() -> Tensor:
        return _product(x.to(device_type), data.to(device_type), None, None, format_number, n, k)

    return gives(expected, compute, f"products with {kind.name} weights on {device_type}")
