"""Packs a quantised matrix into the weight format that holds its numbers, or into the nearest one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from acclimate.errors import CorruptModelError
from acclimate.llm.files.matrix_parts import MatrixPart, matrix_parts
from acclimate.llm.kernels import PackedWeight
from acclimate.llm.kernels.formats import BLOCK_COLUMNS, GROUP_ROWS, WEIGHT_FORMATS, WeightFormat
from acclimate.llm.kernels.quantize import quantize_rows
from acclimate.llm.kernels.words import Words
from acclimate.llm.published.numbers import QuantisedMatrix, Scales

NEAREST = "uint8"
"""The format of weights that no format holds exactly."""

_CHUNK_VALUES = 1 << 25
"""The values that are read at a time."""


@dataclass(frozen=True)
class Packed:
    """A packed matrix."""

    weight: PackedWeight
    error: float
    """The root mean square of the changes of the values, relative to that of the values; 0: none changed."""


def quantised_parts(tensor: Tensor) -> list[MatrixPart] | None:
    """Returns a deferred matrix, or each of a stack, as a part of quantised matrices; ``None``: it is not."""
    return matrix_parts(tensor, lambda source: isinstance(source, QuantisedMatrix))


def pack_part(part: MatrixPart, name: str, where: str) -> Packed:
    """Reads and packs one of the parts that :func:`quantised_parts` returns; messages have name and folder.

    Raises:
        CorruptModelError: a scale is infinite or not a number.
    """
    scales = _scales(part)
    if not scales.scale.float().isfinite().all():
        raise CorruptModelError(f"the tensor {name} in {where} is corrupt: a scale of it is infinite or NaN")
    n, k = part.shape
    numbers = _Blocks.of(scales, k)
    bits = max(_matrix(source).reader.bits for source in part.sources)
    kind = numbers.format_of(bits) if numbers is not None and scales.zero is not None else None
    if kind is not None and numbers is not None:
        pieces = (numbers.in_format(kind, cast(Words, codes), rows) for rows, codes in _codes(part))
        return Packed(PackedWeight.from_words(pieces, kind.name, (n, k)), 0.0)
    return _nearest(part, scales)


def _nearest(part: MatrixPart, scales: Scales) -> Packed:
    kind, squares = WEIGHT_FORMATS[NEAREST], [0.0, 0.0]

    def pieces() -> Iterator[tuple[Words, Mapping[str, Tensor]]]:
        for rows, codes in _codes(part, _CHUNK_VALUES // 16):
            some = Scales(
                scales.scale[rows], None if scales.zero is None else scales.zero[rows], scales.group
            )
            values = some.values(codes)
            made = quantize_rows(values, kind)
            squares[0] += float((made.values(kind)[:, : values.shape[1]] - values).square().sum())
            squares[1] += float(values.square().sum())
            yield Words.of_bytes(made.codes[:, : values.shape[1]]), made.fields

    weight = PackedWeight.from_words(pieces(), NEAREST, part.shape)
    return Packed(weight, math.sqrt(squares[0] / squares[1]) if squares[1] else 0.0)


def _matrix(source: object) -> QuantisedMatrix:
    return cast(QuantisedMatrix, source)


def _scales(part: MatrixPart) -> Scales:
    """Returns the scales of a part, row by row and column by column."""
    found = []
    for source, first, last in part.rows:
        pieces = [_matrix(source).reader.scales((first, last), columns) for columns in part.columns]
        found.append(pieces[0].joined(pieces[1:], 1))
    if any(not torch.equal(other.group, found[0].group) for other in found[1:]):
        # The groups of matrices below one another differ: each column gets its own.
        found = [
            Scales(old.scale[:, old.group], old.zero[:, old.group] if old.zero is not None else None,
                   torch.arange(len(old.group)))
            for old in found
        ]  # fmt: skip
    return found[0].joined(found[1:], 0)


def _codes(part: MatrixPart, most: int = _CHUNK_VALUES) -> Iterator[tuple[slice, Words | Tensor]]:
    """Yields the codes of whole groups of rows."""
    n, k = part.shape
    step = max(most // max(k, 1) // GROUP_ROWS, 1) * GROUP_ROWS
    for start in range(0, n, step):
        stop = min(start + step, n)
        some = cast(MatrixPart, part.between(-2, start, stop))
        pieces = [
            [_matrix(source).reader.codes((first, last), columns) for columns in part.columns]
            for source, first, last in some.rows
        ]
        yield slice(start, stop), _together(pieces)


def _together(pieces: list[list[Words | Tensor]]) -> Words | Tensor:
    """Returns the codes of matrices below and beside one another."""
    if len(pieces) == len(pieces[0]) == 1:
        return pieces[0][0]
    is_words = isinstance(pieces[0][0], Words)
    whole = torch.cat(
        [
            torch.cat([piece.codes() if isinstance(piece, Words) else piece for piece in row], 1)
            for row in pieces
        ]
    )
    return Words.of_bytes(whole) if is_words else whole


@dataclass(frozen=True)
class _Blocks:
    """Scales and zeros that each belong to whole blocks of 32 columns."""

    scales: Scales
    group: Tensor
    """[blocks]: the group of each block."""
    columns: int

    @classmethod
    def of(cls, scales: Scales, columns: int) -> _Blocks | None:
        """Returns the blocks; ``None`` if a block has columns of several groups."""
        if columns == 0:
            return None
        missing = -columns % BLOCK_COLUMNS
        group = torch.cat([scales.group, scales.group[-1:].expand(missing)]).view(-1, BLOCK_COLUMNS)
        if not bool((group == group[:, :1]).all()):
            return None
        return cls(scales, group[:, 0].contiguous(), columns)

    def format_of(self, bits: int) -> WeightFormat | None:
        """Returns the format that holds the numbers exactly, with the fewest bytes; ``None``: none does."""
        scale, zero = self.scales.scale, cast(Tensor, self.scales.zero)
        least, most = int(zero.min()), int(zero.max())
        middle = 128 if bits == 8 else 8
        if bits == 8 and scale.shape[1] == 1 and least == most == middle:
            return WEIGHT_FORMATS["int8"]
        if bool((scale.half().float() == scale.float()).all()):
            if least == most == middle:
                return WEIGHT_FORMATS["q8_0" if bits == 8 else "q4_0"]
            if least >= middle - 128 and most < middle + 128:
                return WEIGHT_FORMATS["uint8" if bits == 8 else "uint4"]
        if scale.shape[1] == 1 and least >= (1 << bits) - 128 and most <= 128:
            return WEIGHT_FORMATS["int8"]  # any code less its zero has 8 bits with a sign
        return None

    def in_format(self, kind: WeightFormat, codes: Words, rows: slice) -> tuple[Words, Mapping[str, Tensor]]:
        """Returns the codes of rows, and their scales, in a format that :meth:`format_of` chose."""
        scale, zero = self.scales.scale[rows], cast(Tensor, self.scales.zero)[rows]
        if kind.name == "int8":
            if bool((zero != kind.offset).any()):
                moved = codes.codes().to(torch.int16) + (kind.offset - zero)
                codes = Words.of_bytes(moved.to(torch.uint8))
            return codes, {"scale": scale.float()}
        fields = {"scale": scale.half()[:, self.group]}
        if any(field.name == "zero" for field in kind.fields):
            fields["zero"] = (zero - kind.offset).to(torch.int8)[:, self.group]
        return codes, fields
