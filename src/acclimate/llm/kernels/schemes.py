"""The storage layouts of quantised weights, which the native kernels read.

A quantised weight is a matrix of bytes with one row for each group of 16 weight rows (the last one filled up
with zeros), which a kernel reads from front to back. A group has its fields, one after the other, each from a
multiple of 64 bytes on, and then its codes:

- A field holds, for each part of the row, one value for each of the 16 rows.
- The codes come in blocks of 32 columns; a block is 8 quads of 4 columns. A quad of the 16 rows is one vector
  of 64 bytes, row by row. A block of 8-bit codes is 8 vectors. Of smaller codes it is 4 vectors, with quads 0
  to 3 in the lower and quads 4 to 7 in the upper half of the bytes, followed by the fifth bits (one vector:
  bit ``i`` belongs to quad ``i``) or the fifth and sixth bits (two vectors, for four quads each: bits ``2i``
  and ``2i + 1`` belong to its quad ``i``).

A value is ``scale * (code - offset)``, plus ``low`` where there is such a field; where a scheme has block
scales it is ``scale * block_scale * (code - offset) - low_scale * block_low``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from acclimate.errors import WeightError

GROUP_ROWS = 16
"""The weight rows that a group interleaves."""
BLOCK_COLUMNS = 32
"""The columns of a block of codes."""
DENSE = "dense"
"""The scheme of a weight that is the model's own tensor."""
DENSE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of dense weights, and of inputs."""
_ALIGNMENT = 64
_CODE_BYTES = {8: 512, 4: 256, 5: 320, 6: 384}


@dataclass(frozen=True)
class Field:
    """The scales or lows of a scheme."""

    name: str
    dtype: torch.dtype
    columns: int
    """The columns that share one value; 0: the whole row."""

    def parts(self, columns: int) -> int:
        """Returns the values of a row."""
        return columns // self.columns if self.columns else 1

    def group_bytes(self, columns: int) -> int:
        """Returns the bytes of this field in a group, with those that align the next one."""
        size = self.parts(columns) * GROUP_ROWS * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Scheme:
    """One way to quantise a weight."""

    name: str
    number: int
    """The scheme's number in csrc/linear.h."""
    bits: int
    offset: int
    """The number that is subtracted from a code."""
    fields: tuple[Field, ...]
    gguf_bytes: int = 0
    """The bytes of a block in a GGUF file; 0: GGUF has no such blocks."""

    @property
    def columns(self) -> int:
        """The columns of an indivisible block; a row is padded to a multiple of it."""
        return max(BLOCK_COLUMNS, *(field.columns for field in self.fields))

    @property
    def code_bytes(self) -> int:
        """The bytes of the codes of a block in a group."""
        return _CODE_BYTES[self.bits]

    def padded(self, columns: int) -> int:
        """Returns the columns of a row filled up to whole blocks."""
        return -(-columns // self.columns) * self.columns

    def group_bytes(self, columns: int) -> int:
        """Returns the bytes of a group."""
        columns = self.padded(columns)
        header = sum(field.group_bytes(columns) for field in self.fields)
        return header + columns // BLOCK_COLUMNS * self.code_bytes


_F16, _F32, _U8, _I8 = torch.float16, torch.float32, torch.uint8, torch.int8
_BLOCK = (Field("scale", _F16, 32),)
_BLOCK_AND_LOW = (*_BLOCK, Field("low", _F16, 32))
_SUPER_BLOCK = (Field("scale", _F16, 256), Field("low_scale", _F16, 256),
                Field("block_scale", _U8, 32), Field("block_low", _U8, 32))  # fmt: skip
_ROW = (Field("scale", _F32, 0), Field("low_scale", _F32, 0),
        Field("block_scale", _U8, 32), Field("block_low", _U8, 32))  # fmt: skip

SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8", 1, 8, 128, (Field("scale", _F32, 0),)),
        Scheme("int4", 2, 4, 0, _ROW),
        Scheme("q4_0", 3, 4, 8, _BLOCK, 18),
        Scheme("q4_1", 4, 4, 0, _BLOCK_AND_LOW, 20),
        Scheme("q5_0", 5, 5, 16, _BLOCK, 22),
        Scheme("q5_1", 6, 5, 0, _BLOCK_AND_LOW, 24),
        Scheme("q8_0", 7, 8, 128, _BLOCK, 34),
        Scheme("q4_k", 8, 4, 0, _SUPER_BLOCK, 144),
        Scheme("q5_k", 9, 5, 0, _SUPER_BLOCK, 176),
        Scheme("q6_k", 10, 6, 32, (Field("scale", _F16, 256), Field("block_scale", _I8, 16)), 210),
        Scheme("int5", 11, 5, 0, _ROW),
    )
}
"""The quantised schemes by name: ours, and the block types of GGUF files."""

GGUF_SCHEMES = tuple(scheme.name for scheme in SCHEMES.values() if scheme.gguf_bytes)
"""The block types of GGUF files that have kernels, in lower case."""


def find_scheme(name: str) -> Scheme:
    """Returns a quantised scheme.

    Raises:
        WeightError: there is none of that name.
    """
    if name not in SCHEMES:
        raise WeightError(f'"{name}" is not a scheme of quantised weights: {", ".join(SCHEMES)}.')
    return SCHEMES[name]


def scheme_of_number(number: int) -> Scheme:
    """Returns the quantised scheme of an op's argument.

    Raises:
        WeightError: there is none of that number.
    """
    found = next((scheme for scheme in SCHEMES.values() if scheme.number == number), None)
    if found is None:
        raise WeightError(f"There is no scheme of quantised weights with the number {number}.")
    return found
