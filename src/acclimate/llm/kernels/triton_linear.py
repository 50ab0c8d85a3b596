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
_SHAPE_OF_ROW = {"TOGETHER": 16, "STAGES": 2, "num_warps": 8}
_SHAPE_OF_ROWS = {"TOGETHER": 8, "STAGES": 2, "num_warps": 4}
_TYPES = {torch.float32: "f32", torch.float16: "f16", torch.uint8: "u8", torch.int8: "i8"}


# Half of a block is 16 columns, whose codes of 16 rows are 256 bytes: 4 quads x 16 rows x 4 columns. Tensors
# have these three dimensions behind that of the blocks.
@triton.jit  # type: ignore[untyped-decorator]
def _field(begin, halves, inside, TYPE: tl.constexpr, SHARED: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Returns a field's number for the rows of each half; ``SHARED`` halves have one in common, 0: all."""
    if TYPE == "f32":
        numbers = begin.to(tl.pointer_type(tl.float32))
    elif TYPE == "f16":
        numbers = begin.to(tl.pointer_type(tl.float16))
    elif TYPE == "i8":
        numbers = begin.to(tl.pointer_type(tl.int8))
    else:
        numbers = begin
    place = halves * 0 if SHARED == 0 else halves // SHARED
    row = tl.arange(0, 16)[None, None, :, None]
    return tl.load(numbers + place * 16 + row, mask=inside, other=0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _bytes(group, block, inside, codes_begin, upper: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Returns the first, or the upper, 256 bytes of blocks of codes."""
    quad, row = tl.arange(0, 4)[None, :, None, None], tl.arange(0, 16)[None, None, :, None]
    byte = quad * 64 + row * 4 + tl.arange(0, 4)[None, None, None, :]
    at = group + codes_begin + block * (64 * BITS) + byte + 256 * upper
    return tl.load(at, mask=inside, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _values(  # type: ignore[no-untyped-def]
    group, block, inside, codes, half: tl.constexpr, table,
    codes_begin, scale_begin, low_scale_begin, block_begin, low_begin,
    BITS: tl.constexpr, OFFSET: tl.constexpr, HAS_TABLE: tl.constexpr,  # noqa: N803
    SCALE: tl.constexpr, SCALE_SHARED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SHARED: tl.constexpr,  # noqa: N803
    LOW: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Returns the values of a half of blocks, in float32."""
    quad, row = tl.arange(0, 4)[None, :, None, None], tl.arange(0, 16)[None, None, :, None]
    bits = group + codes_begin + block * (64 * BITS) + 256 + row * 4 + tl.arange(0, 4)[None, None, None, :]
    code = codes.to(tl.int32)
    if BITS != 8:
        code = (code >> 4 * half) & 15
    if BITS == 5:
        fifth = tl.load(bits, mask=inside, other=0).to(tl.int32)
        code += ((fifth >> quad + 4 * half) & 1) << 4
    if BITS == 6:
        high = tl.load(bits + 64 * half, mask=inside, other=0).to(tl.int32)
        code += ((high >> quad * 2) & 3) << 4
    value = tl.load(table + code) - OFFSET if HAS_TABLE else (code - OFFSET).to(tl.float32)
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
    value *= factor
    if LOW == "low":
        value += _field(group + low_begin, halves, inside, "f16", 2)
    if LOW == "zero":
        value -= scale * _field(group + low_begin, halves, inside, "i8", 2)
    if LOW == "block_low":
        low_scale = _field(group + low_scale_begin, halves, inside, SCALE, SCALE_SHARED)
        value -= low_scale * _field(group + low_begin, halves, inside, "u8", 2)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def _row_kernel(  # type: ignore[no-untyped-def]
    x, data, table, bias, chosen, result, n, k, groups, blocks, group_bytes,
    codes_begin, scale_begin, low_scale_begin, block_begin, low_begin,
    BITS: tl.constexpr, OFFSET: tl.constexpr, HAS_TABLE: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr, HAS_EXPERTS: tl.constexpr,  # noqa: N803
    SCALE: tl.constexpr, SCALE_SHARED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SHARED: tl.constexpr,  # noqa: N803
    LOW: tl.constexpr, TOGETHER: tl.constexpr, STAGES: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Multiplies one input row by 16 rows of a weight, or of the weight of its expert."""
    number, input_row = tl.program_id(0), tl.program_id(1)
    group = data + number.to(tl.int64) * group_bytes
    if HAS_EXPERTS:
        group += tl.load(chosen + input_row).to(tl.int64) * groups * group_bytes
    x += input_row * k
    column = tl.arange(0, 4)[None, :, None, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    total = tl.zeros((TOGETHER, 4, 16, 4), tl.float32)
    for first in tl.range(0, blocks, TOGETHER, num_stages=STAGES):
        block = first + tl.arange(0, TOGETHER)[:, None, None, None]
        inside = block < blocks
        codes = _bytes(group, block, inside, codes_begin, 0, BITS)
        if BITS == 8:
            upper = _bytes(group, block, inside, codes_begin, 1, BITS)
        for half in tl.static_range(2):
            value = _values(
                group, block, inside, upper if BITS == 8 and half == 1 else codes, half, table,
                codes_begin, scale_begin, low_scale_begin, block_begin, low_begin,
                BITS, OFFSET, HAS_TABLE, SCALE, SCALE_SHARED, BLOCK, BLOCK_SHARED, LOW,
            )  # fmt: skip
            place = block * 32 + half * 16 + column
            total += value * tl.load(x + place, mask=place < k, other=0).to(tl.float32)
    row = number * 16 + tl.arange(0, 16)
    found = tl.sum(tl.sum(tl.sum(total, 3), 1), 0)
    if HAS_BIAS:
        found += tl.load(bias + row, mask=row < n, other=0).to(tl.float32)
    tl.store(result + input_row * n + row, found.to(result.dtype.element_ty), mask=row < n)


@triton.jit  # type: ignore[untyped-decorator]
def _rows_kernel(  # type: ignore[no-untyped-def]
    x, data, table, bias, result, rows, n, k, blocks, group_bytes,
    codes_begin, scale_begin, low_scale_begin, block_begin, low_begin,
    BITS: tl.constexpr, OFFSET: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_BIAS: tl.constexpr,  # noqa: N803
    SCALE: tl.constexpr, SCALE_SHARED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SHARED: tl.constexpr,  # noqa: N803
    LOW: tl.constexpr, TOGETHER: tl.constexpr, STAGES: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Multiplies up to 16 input rows by 16 rows of a weight, whose values are rounded to their dtype."""
    number = tl.program_id(0)
    group = data + number.to(tl.int64) * group_bytes
    input_row, column = tl.arange(0, 16)[:, None], tl.arange(0, TOGETHER * 16)[None, :]
    total = tl.zeros((16, 16), tl.float32)
    for first in tl.range(0, blocks, TOGETHER, num_stages=STAGES):
        block = first + tl.arange(0, TOGETHER)[:, None, None, None]
        inside = block < blocks
        codes = _bytes(group, block, inside, codes_begin, 0, BITS)
        if BITS == 8:
            upper = _bytes(group, block, inside, codes_begin, 1, BITS)
        for half in tl.static_range(2):
            value = _values(
                group, block, inside, upper if BITS == 8 and half == 1 else codes, half, table,
                codes_begin, scale_begin, low_scale_begin, block_begin, low_begin,
                BITS, OFFSET, HAS_TABLE, SCALE, SCALE_SHARED, BLOCK, BLOCK_SHARED, LOW,
            )  # fmt: skip
            by_column = tl.reshape(tl.permute(value, (0, 1, 3, 2)), (TOGETHER * 16, 16))
            place = (first + column // 16) * 32 + half * 16 + column % 16
            given = tl.load(x + input_row * k + place, mask=(input_row < rows) & (place < k), other=0)
            total = tl.dot(given, by_column.to(given.dtype), total, input_precision="ieee")
    row = number * 16 + tl.arange(0, 16)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + row, mask=row < n, other=0).to(tl.float32)
    at = result + input_row * n + row
    tl.store(at, total.to(result.dtype.element_ty), mask=(input_row < rows) & (row < n))


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
    x, rows = x.contiguous(), x.numel() // k
    result = x.new_empty(*x.shape[:-1], n)
    table = layout.codebook(kind.codebook, x.device) if kind.codebook else x
    blocks = kind.padded(k) // BLOCK_COLUMNS
    begins, constants = _begins(format_number, k), _constants(format_number)
    bias_given = x if bias is None else bias.contiguous()
    if rows > 1 and chosen is None:
        _rows_kernel[(groups,)](
            x, data, table, bias_given, result, rows, n, k, blocks, data.shape[-1], *begins,
            HAS_BIAS=bias is not None, **_SHAPE_OF_ROWS, **constants,
        )  # fmt: skip
        return result
    _row_kernel[(groups, rows)](
        x, data, table, bias_given, x if chosen is None else chosen, result,
        n, k, groups, blocks, data.shape[-1], *begins,
        HAS_BIAS=bias is not None, HAS_EXPERTS=chosen is not None, **_SHAPE_OF_ROW, **constants,
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
