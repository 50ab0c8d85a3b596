"""Matrices with one whole number or float8 for each value: compressed-tensors' INT8, and FP8 of all kinds."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from acclimate.errors import CorruptModelError
from acclimate.llm.files.deferred_tensors import Source
from acclimate.llm.kernels.words import Words
from acclimate.llm.published.numbers import Range, Scales, read, require_dtype, require_shape
from acclimate.llm.published.packed_words import check_row_scales, group_count, row_scales

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class WholeNumbers:
    """INT8, of which a file may use fewer bits; scales are [outputs, groups]."""

    weight: Source
    weight_scale: Source
    weight_zero_point: Source | None
    bits: int
    shape: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        require_dtype(self.weight, lambda dtype: dtype == torch.int8, "torch.int8")
        n, k = self.shape = _matrix(self.weight)
        because = f"its weight is of shape [{n}, {k}]"
        self._groups = check_row_scales(self.weight_scale, n, k, because)
        if self.weight_zero_point is not None:
            check_row_scales(self.weight_zero_point, n, k, because)

    def scales(self, rows: Range, columns: Range) -> Scales:
        """Returns the scales of a part."""
        n, k = self.shape
        scale = row_scales(self.weight_scale, rows, n)
        zero = torch.full(scale.shape, 1 << self.bits - 1, dtype=torch.int16)
        if self.weight_zero_point is not None:
            zero = zero + row_scales(self.weight_zero_point, rows, n).to(torch.int16)
        group = torch.arange(*columns) // -(-k // self._groups)
        return Scales(scale, zero, group)

    def codes(self, rows: Range, columns: Range) -> Words:
        """Returns the codes of a part, which begin at 0."""
        values = read(self.weight, (rows, columns))
        if self.bits == 8:
            return Words.of_bytes(values, flip=128)
        return Words.of_bytes(values + (1 << self.bits - 1))


@dataclass
class Float8:
    """FP8 with a scale for the matrix, each row or each block of rows and columns."""

    weight: Source
    scale: Source
    block: tuple[int, int] | None
    """The rows and columns that share a scale; ``None``: the scales' shape says it."""
    bits: int = 8
    shape: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        require_dtype(self.weight, lambda dtype: dtype in FLOAT8, "torch.float8_e4m3fn")
        n, k = self.shape = _matrix(self.weight)
        because = f"its weight is of shape [{n}, {k}]"
        if self.block is not None:
            rows, columns = self.block
            because += f" with a scale for each {rows} x {columns} values"
            require_shape(self.scale, (group_count(n, rows), group_count(k, columns)), because)
        else:
            check_row_scales(self.scale, n, k, because)

    def scales(self, rows: Range, columns: Range) -> Scales:
        """Returns the scales of a part."""
        n, k = self.shape
        if self.block is None:
            scale = row_scales(self.scale, rows, n)
            return Scales(scale.float(), None, torch.arange(*columns) // max(-(-k // scale.shape[1]), 1))
        height, width = self.block
        first = rows[0] // height
        blocks = read(self.scale, ((first, group_count(rows[1], height)), (0, group_count(k, width))))
        scale = blocks.float()[torch.arange(*rows) // height - first]
        return Scales(scale, None, torch.arange(*columns) // width)

    def codes(self, rows: Range, columns: Range) -> Tensor:
        """Returns the values of a part without their scales."""
        return read(self.weight, (rows, columns))


def _matrix(source: Source) -> tuple[int, int]:
    if len(source.shape) != 2:
        raise CorruptModelError(f"the tensor {source.name} is of shape {list(source.shape)}, not a matrix")
    return source.shape[0], source.shape[1]
