"""The operators: schemas, fake kernels, and plain torch for devices without native code.

A packed weight is ``data`` with the number of its format (0: dense) and its shape [n, k]; see
:mod:`acclimate.llm.kernels.formats`. The quantised blocks of GGUF files are read without loss: codes and
scales.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from acclimate.llm.kernels import layout, words
from acclimate.llm.kernels.formats import GROUP_ROWS, WeightFormat, format_of_number
from acclimate.llm.kernels.layout import Parts
from acclimate.ops import registry
from acclimate.ops.registry import define_functional
from acclimate.ops.simd import chosen_isa

_TILE_BYTES = 4 << 20
"""The size of intermediate results, in float32, that stay in a cache of the host."""
_LAUNCH_BYTES = 256 << 20
"""Their size on a device, on which starting a kernel costs more than memory does."""

# csrc/operators.cpp reads the arguments in this order.
_LINEAR = "packed_linear(Tensor x, Tensor data, Tensor? bias, int format_number, int n, int k) -> Tensor"
_VALUES = "packed_values(Tensor data, int format_number, int n, int k, ScalarType dtype) -> Tensor"
_ROWS = "packed_rows(Tensor data, Tensor ids, int format_number, int n, int k, ScalarType dtype) -> Tensor"
_FROM_GGUF = "packed_from_gguf(Tensor blocks, int format_number, int n, int k) -> Tensor"
_EXPERTS = "packed_experts(Tensor x, Tensor data, Tensor chosen, int format_number, int n, int k) -> Tensor"
_TOP = "packed_top(Tensor x, Tensor data, int format_number, int n, int k, int count) -> (Tensor, Tensor)"

_ONLY_NATIVE = (
    "inference_use_isa(int isa) -> ()",
    "inference_limit_threads(int most) -> ()",
    # A decoder's step; acclimate.llm.decode.native writes the numbers that csrc/decode_program.h reads.
    "decode_start(Tensor program) -> int",
    "decode_step(int number, Tensor cache, Tensor tokens, Tensor starts, int place, Tensor(a!) logits, "
    "Tensor(b!) best, Tensor(c!) largest, int threads) -> bool",
    "decode_can_prefill(int number) -> bool",
    "decode_end(int number) -> ()",
)


def define() -> None:
    """Defines the operators, once per process.

    Raises:
        InvalidEnvironmentError: ``ACCLIMATE_CPU_ISA`` names no instruction set of this machine.
    """
    chosen_isa()
    registry.define(_ONLY_NATIVE)
    define_functional(_LINEAR, linear, _fake_linear)
    define_functional(_VALUES, _values, _fake_values)
    define_functional(_ROWS, _rows, _fake_rows)
    define_functional(_FROM_GGUF, _from_gguf, _fake_from_gguf)
    define_functional(words.SCHEMA, words.from_words, words.fake_from_words)
    define_functional(_TOP, _top, _fake_top)
    define_functional(_EXPERTS, experts, _fake_experts)


def linear(x: Tensor, data: Tensor, bias: Tensor | None, format_number: int, n: int, k: int) -> Tensor:
    """The operator ``packed_linear`` in plain torch: a tile of the weight's rows at a time, in float32."""
    wide = x.float()
    if format_number == 0:
        result = functional.linear(wide, data.float())
    else:
        kind = format_of_number(format_number)
        tile = _groups_together(data, k)
        pieces = [
            functional.linear(wide, layout.unpack(part, kind, k).values(kind)[:, :k])
            for part in data.split(tile)
        ]
        result = torch.cat(pieces, dim=-1)[..., :n] if pieces else wide.new_zeros(*x.shape[:-1], 0)
    if bias is not None:
        result = result + bias.float()
    return result.to(x.dtype).contiguous()


def _groups_together(data: Tensor, k: int) -> int:
    """Returns how many groups of rows are unpacked at a time."""
    limit = _TILE_BYTES if data.device.type == "cpu" else _LAUNCH_BYTES
    return limit // (4 * max(k, 1)) // GROUP_ROWS + 1


def _fake_linear(x: Tensor, data: Tensor, bias: Tensor | None, format_number: int, n: int, k: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], n)


def _values(data: Tensor, format_number: int, n: int, k: int, dtype: torch.dtype) -> Tensor:
    kind = format_of_number(format_number)
    result = data.new_empty(n, k, dtype=dtype)
    groups = _groups_together(data, k)
    for first, part in enumerate(data.split(groups)):
        rows = result[first * groups * GROUP_ROWS : (first + 1) * groups * GROUP_ROWS]
        rows.copy_(layout.unpack(part, kind, k).values(kind)[: len(rows), :k])
    return result


def _fake_values(data: Tensor, format_number: int, n: int, k: int, dtype: torch.dtype) -> Tensor:
    return data.new_empty(n, k, dtype=dtype)


def _rows(data: Tensor, ids: Tensor, format_number: int, n: int, k: int, dtype: torch.dtype) -> Tensor:
    kind = format_of_number(format_number)
    flat = ids.flatten()
    # The last group has room for more rows than the weight has. A number of no group makes torch raise.
    groups = torch.where((flat >= 0) & (flat < n), flat // GROUP_ROWS, len(data))
    parts = layout.unpack(data.index_select(0, groups), kind, k)
    lanes = torch.arange(len(flat), device=flat.device) * GROUP_ROWS + flat % GROUP_ROWS
    return parts.rows(lanes).values(kind, dtype)[:, :k].reshape(*ids.shape, k)


def _fake_rows(data: Tensor, ids: Tensor, format_number: int, n: int, k: int, dtype: torch.dtype) -> Tensor:
    return data.new_empty(*ids.shape, k, dtype=dtype)


def _from_gguf(blocks: Tensor, format_number: int, n: int, k: int) -> Tensor:
    kind = format_of_number(format_number)
    result = blocks.new_empty(-(-n // GROUP_ROWS), kind.group_bytes(k))
    groups = max(_TILE_BYTES // max(k, 1) // GROUP_ROWS, 1)
    for first, part in enumerate(blocks.split(groups * GROUP_ROWS)):
        packed = layout.pack(read_blocks(part, kind, k), kind)
        result[first * groups : first * groups + len(packed)] = packed
    return result


def _fake_from_gguf(blocks: Tensor, format_number: int, n: int, k: int) -> Tensor:
    return blocks.new_empty(-(-n // GROUP_ROWS), format_of_number(format_number).group_bytes(k))


def experts(x: Tensor, data: Tensor, chosen: Tensor, format_number: int, n: int, k: int) -> Tensor:
    """Multiplies rows, each by the weight of its expert, without asking the device which experts these are.

    Args:
        x: [rows, k].
        data: experts x groups x bytes of a group.
        chosen: the number of each row's expert.
        format_number, n, k: as for the other operators, of one expert.

    Returns:
        [rows, n], in the dtype of ``x``.
    """
    kind, groups = format_of_number(format_number), -(-n // GROUP_ROWS)
    together = max(1, _groups_together(data, k) // max(groups, 1))
    pieces = [
        (
            layout.unpack(data[numbers].flatten(0, 1), kind, k).values(kind)[:, :k].view(len(numbers), -1, k)
            @ row
        )
        for numbers, row in zip(chosen.split(together), x.float().unsqueeze(-1).split(together), strict=True)
    ]
    found = torch.cat(pieces).squeeze(-1)[:, :n] if pieces else x.new_empty(0, n)
    return found.to(x.dtype).contiguous()


def _fake_experts(x: Tensor, data: Tensor, chosen: Tensor, format_number: int, n: int, k: int) -> Tensor:
    return x.new_empty(x.shape[0], n)


def _top(x: Tensor, data: Tensor, format_number: int, n: int, k: int, count: int) -> tuple[Tensor, Tensor]:
    found = torch.ops.acclimate.packed_linear(x.float(), data, None, format_number, n, k).topk(count)
    return found.values, found.indices


def _fake_top(
    x: Tensor, data: Tensor, format_number: int, n: int, k: int, count: int
) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], count)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int64)


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
