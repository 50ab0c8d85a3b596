"""The weight formats: csrc/formats.def, which C++ includes, as Python reads it.

A quantised weight is a matrix of bytes with one row for each group of 16 weight rows (the last one filled up
with zeros), which a kernel reads from front to back. A group has its fields, one after the other, each from a
multiple of 64 bytes on, and then its codes:

- A field holds, for each part of the row, one value for each of the 16 rows.
- The codes come in blocks of 32 columns; a block is 8 quads of 4 columns. A quad of the 16 rows is one vector
  of 64 bytes, row by row. A block of 8-bit codes is 8 vectors. Of smaller codes it is 4 vectors, with quads 0
  to 3 in the lower and quads 4 to 7 in the upper half of the bytes, followed by the fifth bits (one vector:
  bit ``i`` belongs to quad ``i``) or the fifth and sixth bits (two vectors, for four quads each: bits ``2i``
  and ``2i + 1`` belong to its quad ``i``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from acclimate.errors import WeightError

GROUP_ROWS = 16
"""The weight rows that a group interleaves."""
BLOCK_COLUMNS = 32
"""The columns of a block of codes."""
DENSE = "dense"
"""The format of a weight that is the model's own tensor."""
DENSE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of dense weights, and of inputs."""
TABLE = Path(__file__).parent / "csrc" / "formats.def"
"""The table of formats; it says what each of its columns is."""

_ALIGNMENT = 64
_DTYPES = {"f32": torch.float32, "f16": torch.float16, "u8": torch.uint8, "i8": torch.int8}
_SCALES_LINE = re.compile(r"SCALES\((\w+),((?: FIELD\(\w+, \w+, \d+\))+)\)")
_CODEBOOK_LINE = re.compile(r"CODEBOOK\((\w+)((?:, \d+){16})\)")
_FIELD = re.compile(r"FIELD\((\w+), (\w+), (\d+)\)")
_FORMAT_LINE = re.compile(r"WEIGHT_FORMAT\((\w+)((?:, \.\w+ = (?:Scales::|Codebook::)?\w+)+)\)")
_COLUMN = re.compile(r"\.(\w+) = (?:Scales::|Codebook::)?(\w+)")


@dataclass(frozen=True)
class Field:
    """The scales or lows of a format."""

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
class WeightFormat:
    """One way to store a quantised weight."""

    name: str
    number: int
    """The format's place in the table, which is its number in C++."""
    bits: int
    """The bits of a code."""
    offset: int
    """The number that is subtracted from a code."""
    scales: str
    """The name of its list of fields."""
    fields: tuple[Field, ...]
    gguf_bytes: int = 0
    """The bytes of a block in a GGUF file; 0: GGUF has no such blocks."""
    gguf_halves: int = 0
    """Where the float16 fields begin in such a block."""
    codebook: tuple[int, ...] = ()
    """What each code stands for, before the offset is subtracted; empty: the codes stand for themselves."""

    @property
    def is_gguf(self) -> bool:
        """Whether GGUF files have such blocks; else weights can be quantised to the format."""
        return self.gguf_bytes > 0

    @property
    def columns(self) -> int:
        """The columns of an indivisible block; a row is padded to a multiple of it."""
        return max(BLOCK_COLUMNS, *(field.columns for field in self.fields))

    @property
    def code_bytes(self) -> int:
        """The bytes of the codes of a block in a group."""
        return GROUP_ROWS * BLOCK_COLUMNS * self.bits // 8

    @property
    def gguf_scales(self) -> slice:
        """The bytes of the float16 fields in a block of a GGUF file, which follow one another."""
        halves = sum(field.dtype == torch.float16 for field in self.fields)
        return slice(self.gguf_halves, self.gguf_halves + 2 * halves)

    def padded(self, columns: int) -> int:
        """Returns the columns of a row filled up to whole blocks."""
        return -(-columns // self.columns) * self.columns

    def group_bytes(self, columns: int) -> int:
        """Returns the bytes of a group."""
        columns = self.padded(columns)
        header = sum(field.group_bytes(columns) for field in self.fields)
        return header + columns // BLOCK_COLUMNS * self.code_bytes


def read_table(text: str) -> dict[str, WeightFormat]:
    """Returns the formats of a table by name, in its order.

    Raises:
        ValueError: a line is neither an entry nor a comment or directive of C++.
    """
    scales: dict[str, tuple[Field, ...]] = {}
    codebooks: dict[str, tuple[int, ...]] = {}
    found: dict[str, WeightFormat] = {}
    for line in text.splitlines():
        if not line or line.startswith(("//", "#")):
            continue
        if entry := _SCALES_LINE.fullmatch(line):
            scales[entry[1]] = tuple(
                Field(name, _DTYPES[dtype], int(columns)) for name, dtype, columns in _FIELD.findall(entry[2])
            )
        elif entry := _CODEBOOK_LINE.fullmatch(line):
            codebooks[entry[1]] = tuple(int(number) for number in entry[2].split(", ")[1:])
        elif entry := _FORMAT_LINE.fullmatch(line):
            columns = dict(_COLUMN.findall(entry[2]))
            kind, codebook = columns.pop("scales"), columns.pop("codebook", None)
            numbers = {name: int(value) for name, value in columns.items()}
            found[entry[1]] = WeightFormat(
                entry[1],
                len(found) + 1,
                scales=kind,
                fields=scales[kind],
                codebook=() if codebook is None else codebooks[codebook],
                **numbers,
            )
        else:
            raise ValueError(f"A line of the table of weight formats is no entry: {line!r}.")
    return found


WEIGHT_FORMATS: Mapping[str, WeightFormat] = read_table(TABLE.read_text("utf-8"))
"""The formats of quantised weights by name: ours, and the block types of GGUF files."""

GGUF_FORMATS = tuple(name for name, kind in WEIGHT_FORMATS.items() if kind.is_gguf)
"""The block types of GGUF files that have kernels, in lower case."""

OWN_FORMATS = tuple(name for name, kind in WEIGHT_FORMATS.items() if not kind.is_gguf)
"""The formats that weights can be quantised to."""

_BY_NUMBER = {kind.number: kind for kind in WEIGHT_FORMATS.values()}


def format_of_number(number: int) -> WeightFormat:
    """Returns the format of an op's argument.

    Raises:
        WeightError: there is none of that number.
    """
    if number not in _BY_NUMBER:
        raise WeightError(
            f"There is no weight format with the number {number}, only with 1 to {len(_BY_NUMBER)}."
        )
    return _BY_NUMBER[number]
