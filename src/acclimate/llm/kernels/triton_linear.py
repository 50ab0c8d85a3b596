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
from acclimate.selection import get_accelerator

_MOST_ROWS = 16
"""The most input rows; for more, unpacking a weight once is cheaper than reading it for each of them."""
_MOST_AT_ONCE = 4
"""The most input rows of one program, which has 16 sums in registers for each."""
_MOST_CHOSEN = 65535
"""The most rows of experts: those of a grid's second dimension."""
_TYPES = {torch.float32: "f32", torch.float16: "f16", torch.uint8: "u8", torch.int8: "i8"}


# Half of a block is 16 columns, whose codes of 16 rows are 256 bytes: 4 quads x 16 rows x 4 columns. Tensors
# have these dimensions behind that of the blocks.
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
    at = numbers + place * 16 + tl.arange(0, 16)[None, None, :]
    return tl.load(at, mask=inside, other=0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _scales(  # type: ignore[no-untyped-def]
    group, halves, inside, scale_begin, low_scale_begin, block_begin, low_begin,
    SCALE: tl.constexpr, SCALE_SHARED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SHARED: tl.constexpr,  # noqa: N803
    LOW: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Returns what the numbers of the rows of each half are multiplied by, and what is added then."""
    if SCALE == "exponent":
        exponent = _field(group + scale_begin, halves, inside, "u8", SCALE_SHARED).to(tl.int32)
        power = ((exponent - 1) << 23).to(tl.float32, bitcast=True)
        scale = tl.where(exponent > 1, power, 0.0)  # the others would be denormal
    else:
        scale = _field(group + scale_begin, halves, inside, SCALE, SCALE_SHARED)
    factor = scale
    if BLOCK != "":
        factor = scale * _field(group + block_begin, halves, inside, BLOCK, BLOCK_SHARED)
    low = factor
    if LOW == "low":
        low = _field(group + low_begin, halves, inside, "f16", 2)
    if LOW == "zero":
        low = -scale * _field(group + low_begin, halves, inside, "i8", 2)
    if LOW == "block_low":
        low_scale = _field(group + low_scale_begin, halves, inside, SCALE, SCALE_SHARED)
        low = -low_scale * _field(group + low_begin, halves, inside, "u8", 2)
    return factor, low


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(  # type: ignore[no-untyped-def]
    codes, bits, inside, half: tl.constexpr, table,
    TOGETHER: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, HAS_TABLE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Returns what the codes of a half of some blocks stand for, blocks x 4 x 16 x 4."""
    byte = tl.arange(0, 256)[None, :]
    code = codes.to(tl.int32)
    if BITS != 8:
        code = (code >> 4 * half) & 15
    if BITS == 5:
        fifth = tl.load(bits + byte % 64, mask=inside, other=0).to(tl.int32)
        code |= ((fifth >> byte // 64 + 4 * half) & 1) << 4
    if BITS == 6:
        high = tl.load(bits + 64 * half + byte % 64, mask=inside, other=0).to(tl.int32)
        code |= ((high >> byte // 64 * 2) & 3) << 4
    if HAS_TABLE:
        found = tl.load(table + code) - OFFSET
    else:
        # The bits of 2^23 + code: a GPU converts integers at an eighth of the speed at which it adds.
        found = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608 + OFFSET)
    return tl.reshape(found, (TOGETHER, 4, 16, 4))


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    x, data, table, bias, chosen, result, rows, n, k, groups, blocks, group_bytes,
    codes_begin, scale_begin, low_scale_begin, block_begin, low_begin,
    BITS: tl.constexpr, OFFSET: tl.constexpr, HAS_TABLE: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr, HAS_EXPERTS: tl.constexpr,  # noqa: N803
    SCALE: tl.constexpr, SCALE_SHARED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SHARED: tl.constexpr,  # noqa: N803
    LOW: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Multiplies some input rows by 16 rows of a weight, or one by those of the weight of its expert."""
    number, first_row = tl.program_id(0), tl.program_id(1) * ROWS
    group = data + number.to(tl.int64) * group_bytes
    if HAS_EXPERTS:
        group += tl.load(chosen + first_row).to(tl.int64) * groups * group_bytes
    BY_ROW: tl.constexpr = SCALE_SHARED == 0 and BLOCK == ""  # noqa: N806  # one scale for a row
    column = tl.arange(0, 4)[None, :, None, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    byte = tl.arange(0, 256)[None, :]
    totals = (tl.zeros((TOGETHER, 4, 16), tl.float32),) * ROWS
    for first in range(0, blocks, TOGETHER):
        block = first + tl.arange(0, TOGETHER)
        inside = block[:, None] < blocks
        begin = group + codes_begin + block[:, None] * (64 * BITS)
        codes = tl.load(begin + byte, mask=inside, other=0)
        upper = codes
        if BITS == 8:
            upper = tl.load(begin + 256 + byte, mask=inside, other=0)
        for half in tl.static_range(2):
            numbers = _numbers(
                codes if half == 0 else upper, begin + 256, inside, half, table,
                TOGETHER, BITS, OFFSET, HAS_TABLE,
            )  # fmt: skip
            if not BY_ROW:
                factor, low = _scales(
                    group, (block * 2 + half)[:, None, None], (block < blocks)[:, None, None],
                    scale_begin, low_scale_begin, block_begin, low_begin,
                    SCALE, SCALE_SHARED, BLOCK, BLOCK_SHARED, LOW,
                )  # fmt: skip
            place = block[:, None, None, None] * 32 + half * 16 + column
            sums = ()
            for index in tl.static_range(ROWS):
                is_given = (place < k) & (first_row + index < rows)
                given = tl.load(x + (first_row + index) * k + place, mask=is_given, other=0).to(tl.float32)
                total = tl.sum(numbers * given, 3)
                total = totals[index] + (total if BY_ROW else factor * total)
                if LOW != "":
                    total += low * tl.sum(given, 3)
                sums += (total,)  # type: ignore[assignment]
            totals = sums
    row = number * 16 + tl.arange(0, 16)
    for index in tl.static_range(ROWS):
        found = tl.sum(tl.sum(totals[index], 1), 0)
        if BY_ROW:
            found *= tl.load((group + scale_begin).to(tl.pointer_type(tl.float32)) + tl.arange(0, 16))
        if HAS_BIAS:
            found += tl.load(bias + row, mask=row < n, other=0).to(tl.float32)
        at = result + (first_row + index) * n + row
        tl.store(at, found.to(result.dtype.element_ty), mask=(first_row + index < rows) & (row < n))


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
    if 0 < len(chosen) <= _MOST_CHOSEN and x.numel() and n and _is_right(format_number, x.device.type):
        return _product(x, data, None, chosen.contiguous(), format_number, n, k)
    return operators.experts(x, data, chosen, format_number, n, k)


def _shape(rows: int, groups: int, blocks: int) -> dict[str, int]:
    """Returns how many blocks a program reads at a time, and its warps.

    These were the fastest of nine in int8 and int4 on an H200, for four weights, and 1 and 8 rows. With fewer
    than eight blocks for each warp, a thread has less than four columns of a row, and codes are moved between
    threads.
    """
    if rows > 1 or groups > 512:
        return {"TOGETHER": 16, "num_warps": 2}
    return {"TOGETHER": 64, "num_warps": 4} if blocks > 256 else {"TOGETHER": 32, "num_warps": 2}


def _product(
    x: Tensor, data: Tensor, bias: Tensor | None, chosen: Tensor | None, format_number: int, n: int, k: int
) -> Tensor:
    kind, groups = format_of_number(format_number), -(-n // GROUP_ROWS)
    x, rows = x.contiguous(), x.numel() // k
    result = x.new_empty(*x.shape[:-1], n)
    table = layout.codebook(kind.codebook, x.device) if kind.codebook else x
    blocks = kind.padded(k) // BLOCK_COLUMNS
    at_once = 1 if chosen is not None else min(_MOST_AT_ONCE, triton.next_power_of_2(rows))
    with get_accelerator().device(x.device):  # on whose current stream a kernel is started
        _kernel[(groups, triton.cdiv(rows, at_once))](
            x, data, table, x if bias is None else bias.contiguous(), x if chosen is None else chosen, result,
            rows, n, k, groups, blocks, data.shape[-1], *_begins(format_number, k),
            HAS_BIAS=bias is not None, HAS_EXPERTS=chosen is not None, ROWS=at_once,
            **_shape(at_once, groups, blocks), **_constants(format_number),
        )  # fmt: skip
    return result


@functools.cache
def _is_right(format_number: int, device_type: str) -> bool:
    """Whether the kernel gives plain torch's results for a format, with one row and with several."""
    kind, n, k = format_of_number(format_number), 27, 500
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, k, generator=random)
    codes = torch.randint(0, 1 << kind.bits, (n, kind.padded(k)), dtype=torch.uint8, generator=random)
    fields = {
        field.name: torch.randint(1, 100, (n, field.parts(kind.padded(k))), generator=random).to(field.dtype)
        for field in kind.fields
    }
    data = layout.pack(layout.Parts(codes, fields), kind)
    expected = operators.linear(torch.cat((x, x[:1])), data, None, format_number, n, k)

    def compute() -> Tensor:
        given, packed = x.to(device_type), data.to(device_type)
        return torch.cat(
            [_product(rows, packed, None, None, format_number, n, k) for rows in (given, given[:1])]
        )

    return gives(expected, compute, f"products with {kind.name} weights on {device_type}")
