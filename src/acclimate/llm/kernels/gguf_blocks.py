"""Reads the quantised blocks of a GGUF file, in plain torch: codes and scales, without loss."""

from __future__ import annotations

import torch
from torch import Tensor

from acclimate.llm.kernels.formats import WeightFormat
from acclimate.llm.kernels.layout import Parts

_Read = tuple[Tensor, dict[str, Tensor]]


def read_blocks(blocks: Tensor, kind: WeightFormat, columns: int) -> Parts:
    """Returns the codes and scales of rows of a tensor of a GGUF file.

    Args:
        blocks: the bytes of each row: [rows, bytes].
        kind: the format of the blocks.
        columns: the values of a row, a multiple of the block's.
    """
    rows = blocks.shape[0]
    blocks = blocks.reshape(rows, columns // kind.columns, kind.gguf_bytes)
    codes, fields = _READERS[kind.scales](blocks, kind)
    return Parts(
        codes.reshape(rows, columns), {name: value.reshape(rows, -1) for name, value in fields.items()}
    )


def _half(blocks: Tensor, begin: int) -> Tensor:
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16)


def _bits(values: Tensor, count: int, width: int) -> Tensor:
    """Returns the lowest bits of each byte, then the next ones, …: [..., count, bytes]."""
    return torch.stack([values >> width * i & (1 << width) - 1 for i in range(count)], dim=-2)


def _small(blocks: Tensor, kind: WeightFormat) -> _Read:
    begin, end = kind.gguf_scales.start, kind.gguf_scales.stop
    halves = {field.name: _half(blocks, begin + 2 * i) for i, field in enumerate(kind.fields)}
    return _small_codes(blocks[..., end:], kind.bits), halves


def _small_codes(data: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return data ^ 128  # GGUF's are signed, ours are not
    if bits == 4:
        return _bits(data, 2, 4).flatten(-2)
    high = _bits(data[..., :4], 8, 1).transpose(-1, -2).flatten(-2)  # one bit for each of 32 values
    return _bits(data[..., 4:], 2, 4).flatten(-2) | high << 4


def _with_exponent(blocks: Tensor, kind: WeightFormat) -> _Read:
    return _small_codes(blocks[..., 1:], kind.bits), {"exponent": blocks[..., :1]}


def _scales_and_lows(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns 8 scales and 8 lows of 6 bits each from 12 bytes."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, third & 15 | first >> 2 & 48], dim=-1)
    lows = torch.cat([second & 63, third >> 4 | second >> 2 & 48], dim=-1)
    return scales, lows


def _super(blocks: Tensor, kind: WeightFormat) -> _Read:
    scales, lows = _scales_and_lows(blocks[..., 4:16])
    codes = _bits(blocks[..., -128:].unflatten(-1, (4, 32)), 2, 4)
    if kind.bits == 5:
        codes = codes.flatten(-3, -2) | _bits(blocks[..., 16:48], 8, 1) << 4
    return codes, {"scale": _half(blocks, 0), "low_scale": _half(blocks, 2),
                   "block_scale": scales, "block_low": lows}  # fmt: skip


def _super_half(blocks: Tensor, kind: WeightFormat) -> _Read:
    low = _bits(blocks[..., :128].unflatten(-1, (2, 64)), 2, 4).flatten(-2)
    high = _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 4, 2).flatten(-2)
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return low | high << 4, {"scale": _half(blocks, kind.gguf_halves), "block_scale": scales}


def _super_signed(blocks: Tensor, kind: WeightFormat) -> _Read:
    codes = _bits(blocks[..., 8:].unflatten(-1, (8, 16)), 2, 4).flatten(-2)
    low = _bits(blocks[..., 4:8], 2, 4).transpose(-1, -2).flatten(-2)
    high = _bits(blocks[..., 2:4], 4, 2).transpose(-1, -2).flatten(-2)
    scales = (low | high << 4).to(torch.int8) - 32
    return codes, {"scale": _half(blocks, 0), "block_scale": scales}


_READERS = {
    "block": _small, "block_and_low": _small, "exponent": _with_exponent, "super_block": _super,
    "super_half_block": _super_half, "super_signed_block": _super_signed,
}  # fmt: skip
