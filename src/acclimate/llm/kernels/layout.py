"""Packs codes and scales into the layout that the kernels read, and unpacks them, in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from acclimate.llm.kernels.formats import BLOCK_COLUMNS, GROUP_ROWS, Field, WeightFormat

_QUADS = 8


@dataclass(frozen=True)
class Parts:
    """A quantised weight before it is packed: row by row."""

    codes: Tensor
    """One byte for each value: [rows, columns], whole blocks."""
    fields: Mapping[str, Tensor]
    """Scales and lows by name: [rows, parts]."""

    def values(self, kind: WeightFormat, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the values, computed in float32 in the order of GGUF's own definition."""
        rows, columns = self.codes.shape
        codes = self.codes.float()
        if kind.codebook:
            codes = codebook(kind.codebook, codes.device)[self.codes.long()]
        codes = codes - kind.offset
        scale, low = self._scale(), self.fields.get("low")
        if "block_scale" in self.fields:
            block_scale = self.fields["block_scale"].float()
            parts = block_scale.shape[1]
            scale = _spread(scale, parts) * block_scale
            if "low_scale" in self.fields:
                low = -(_spread(self.fields["low_scale"].float(), parts) * self.fields["block_low"].float())
        if "zero" in self.fields:
            low = -(scale * self.fields["zero"].float())
        values = codes.view(rows, scale.shape[1], columns // scale.shape[1] if columns else 0)
        values = values * scale.unsqueeze(-1)
        if low is not None:
            values = values + low.float().unsqueeze(-1)
        return values.view(rows, columns).to(dtype)

    def _scale(self) -> Tensor:
        if "exponent" in self.fields:
            exponent = self.fields["exponent"].int()
            power = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent - 128)
            return torch.where(exponent > 1, power, 0.0)  # the others would be denormal
        return self.fields["scale"].float()

    def rows(self, chosen: slice | Tensor) -> Parts:
        """Returns some of the rows."""
        return Parts(self.codes[chosen], {name: value[chosen] for name, value in self.fields.items()})


@functools.cache
def codebook(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept, since a device that captures a graph can copy nothing from the host."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


def _spread(values: Tensor, parts: int) -> Tensor:
    """Repeats each value of a row for the parts that share it."""
    return values.repeat_interleave(parts // values.shape[1], dim=1) if values.shape[1] else values


def pack(parts: Parts, kind: WeightFormat) -> Tensor:
    """Returns the bytes of a weight: [groups, bytes of a group]."""
    rows, columns = parts.codes.shape
    header = pack_fields(parts.fields, kind, -(-rows // GROUP_ROWS), columns)
    return torch.cat([header, pack_codes(parts.codes, kind)], dim=1)


def pack_fields(fields: Mapping[str, Tensor], kind: WeightFormat, groups: int, columns: int) -> Tensor:
    """Returns the bytes in front of the codes of each group."""
    return torch.cat(
        [_pack_field(fields[field.name], field, groups, columns) for field in kind.fields], dim=1
    )


def pack_codes(codes: Tensor, kind: WeightFormat) -> Tensor:
    """Returns the bytes of the codes of each group; the rows are of whole blocks."""
    rows, columns = codes.shape
    groups, blocks = -(-rows // GROUP_ROWS), columns // BLOCK_COLUMNS
    codes = _whole_groups(codes, groups).view(groups, GROUP_ROWS, blocks, _QUADS, 4)
    codes = codes.permute(0, 2, 3, 1, 4)  # group, block, quad, row, column
    return _pack_codes(codes, kind.bits).reshape(groups, blocks * kind.code_bytes)


def unpack(data: Tensor, kind: WeightFormat, columns: int) -> Parts:
    """Returns the codes and scales of all rows of the groups, those that fill up the last one too."""
    columns, groups = kind.padded(columns), data.shape[0]
    fields, begin = {}, 0
    for field in kind.fields:
        size = field.parts(columns) * GROUP_ROWS * field.dtype.itemsize
        value = data[:, begin : begin + size].contiguous().view(field.dtype)
        value = value.view(groups, field.parts(columns), GROUP_ROWS)
        fields[field.name] = value.permute(0, 2, 1).reshape(groups * GROUP_ROWS, value.shape[1])
        begin += field.group_bytes(columns)
    blocks = data[:, begin:].reshape(groups, columns // BLOCK_COLUMNS, kind.code_bytes)
    codes = _unpack_codes(blocks, kind.bits).view(groups, blocks.shape[1], _QUADS, GROUP_ROWS, 4)
    return Parts(codes.permute(0, 3, 1, 2, 4).reshape(groups * GROUP_ROWS, columns), fields)


def _whole_groups(values: Tensor, groups: int) -> Tensor:
    missing = groups * GROUP_ROWS - values.shape[0]
    return torch.cat([values, values.new_zeros(missing, values.shape[1])]) if missing else values


def _pack_field(values: Tensor, field: Field, groups: int, columns: int) -> Tensor:
    count = values.shape[1]
    values = _whole_groups(values.to(field.dtype), groups).view(groups, GROUP_ROWS, count)
    data = values.permute(0, 2, 1).reshape(groups, count * GROUP_ROWS).view(torch.uint8)
    missing = field.group_bytes(columns) - data.shape[1]
    return torch.cat([data, data.new_zeros(groups, missing)], dim=1) if missing else data


def _pack_codes(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    low = codes & 15
    pieces = [low[:, :, :4] | low[:, :, 4:] << 4]
    if bits > 4:
        width = bits - 4
        per_byte = 8 // width
        high = codes >> 4
        for first in range(0, _QUADS, per_byte):
            byte = torch.zeros_like(high[:, :, 0])
            for i in range(per_byte):
                byte |= high[:, :, first + i] << width * i
            pieces.append(byte.unsqueeze(2))
    return torch.cat(pieces, dim=2)


def _unpack_codes(blocks: Tensor, bits: int) -> Tensor:
    vectors = blocks.view(blocks.shape[0], blocks.shape[1], blocks.shape[2] // 64, 64)
    if bits == 8:
        return vectors
    codes = torch.cat([vectors[:, :, :4] & 15, vectors[:, :, :4] >> 4], dim=2)
    if bits > 4:
        width = bits - 4
        per_byte = 8 // width
        high = [
            (vectors[:, :, 4 + quad // per_byte] >> width * (quad % per_byte) & (1 << width) - 1) << 4
            for quad in range(_QUADS)
        ]
        codes |= torch.stack(high, dim=2)
    return codes
