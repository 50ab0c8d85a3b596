"""The numbers of a quantised matrix as its file has them: codes, and which scale and zero belong to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from acclimate.errors import CorruptModelError
from acclimate.llm.files.deferred_tensors import Source
from acclimate.llm.files.regions import Region
from acclimate.llm.kernels.words import AWQ, BY_ROW, BY_WORD, Words, unpacked

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

Range = tuple[int, int]
"""The first row or column, and the one after the last."""


@dataclass(frozen=True)
class Scales:
    """The scales and zeros of some rows and columns of a matrix."""

    scale: Tensor
    """[rows, groups], in the file's dtype."""
    zero: Tensor | None
    """[rows, groups], int16: the code of the value zero; ``None``: codes are numbers themselves."""
    group: Tensor
    """[columns], int64: the group of each column."""

    def joined(self, others: Sequence[Scales], dim: int) -> Scales:
        """Returns the scales of matrices below one another (``dim`` 0), or beside one another."""
        whole = [self, *others]
        scale = torch.cat([part.scale for part in whole], dim)
        zeros = [part.zero for part in whole if part.zero is not None]
        zero = torch.cat(zeros, dim) if zeros else None
        if dim == 0:
            return Scales(scale, zero, self.group)
        starts = torch.tensor([0, *(part.scale.shape[1] for part in whole)]).cumsum(0)
        group = torch.cat([part.group + int(start) for part, start in zip(whole, starts, strict=False)])
        return Scales(scale, zero, group)

    def values(self, codes: Words | Tensor) -> Tensor:
        """Returns the values of codes in float32."""
        values = (codes.codes() if isinstance(codes, Words) else codes).float()
        if self.zero is not None:
            values -= self.zero.float()[:, self.group]
        return values.mul_(self.scale.float()[:, self.group])


class Reader(Protocol):
    """Reads parts of one matrix from its file."""

    shape: tuple[int, int]
    """Rows and columns: the outputs and inputs of the layer."""
    bits: int
    """The bits of a code in the file."""

    def scales(self, rows: Range, columns: Range) -> Scales:
        """Returns the scales of a part."""

    def codes(self, rows: Range, columns: Range) -> Words | Tensor:
        """Returns the codes of a part, or floating-point numbers without their scales."""


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """A matrix of a file as a tensor whose values are unpacked when they are read."""

    name: str
    """The name of the parameter, ``….weight``."""
    reader: Reader
    kind: str
    """How it is quantised, for messages: "4 bits of GPTQ"."""
    dtype: torch.dtype = torch.float32
    """The dtype in which values are computed."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.reader.shape

    @property
    def stored_bits(self) -> float:
        """The bits of each value in the file, without those of scales."""
        return self.reader.bits

    def read_into(self, region: Region, out: Tensor) -> None:
        """Unpacks a region."""
        rows, columns = region
        out.copy_(self.reader.scales(rows, columns).values(self.reader.codes(rows, columns)))


def read(source: Source, region: Region | None = None) -> Tensor:
    """Returns a region of a file's tensor, or all of it."""
    region = tuple((0, size) for size in source.shape) if region is None else region
    out = torch.empty([stop - start for start, stop in region], dtype=source.dtype)
    source.read_into(region, out)
    return out


def require_shape(source: Source, shape: tuple[int, ...], because: str) -> None:
    """Raises :class:`CorruptModelError` unless a tensor has a shape."""
    if tuple(source.shape) != shape:
        raise CorruptModelError(
            f"the tensor {source.name} is of shape {list(source.shape)}; {because}, which needs {list(shape)}"
        )


def require_dtype(source: Source, is_right: Callable[[torch.dtype], bool], wanted: str) -> None:
    """Raises :class:`CorruptModelError` unless a tensor has a dtype of a kind."""
    if not is_right(source.dtype):
        raise CorruptModelError(f"the tensor {source.name} has the dtype {source.dtype}, not {wanted}")


def group_count(columns: int, group_size: int) -> int:
    """Returns the number of groups of a row."""
    return -(-columns // group_size)


def _is_int32(dtype: torch.dtype) -> bool:
    return dtype == torch.int32


def _is_floating(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def groups_of(group_index: Tensor | None, columns: Range, group_size: int, groups: int, name: str) -> Tensor:
    """Returns the group of each column.

    Raises:
        CorruptModelError: the file gives a column a group that does not exist.
    """
    if group_index is None:
        return torch.arange(*columns) // group_size
    found = group_index[columns[0] : columns[1]].long()
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < groups:
        raise CorruptModelError(
            f"the tensor {name} gives a column the group {int(found.min())} or {int(found.max())}, but there "
            f"are {groups} groups"
        )
    return found


@dataclass
class ColumnWords:
    """Words of GPTQ, which hold successive inputs of an output, or of AWQ: successive outputs of an input.

    Scales and zeros are [groups, outputs] for both, and a word holds the zeros of successive outputs.
    """

    qweight: Source
    qzeros: Source
    scale: Source
    g_idx: Source | None
    bits: int
    group_size: int
    """The inputs that share a scale; at most 0: all."""
    is_awq: bool
    zero_offset: int
    """What the file's zeros lack: 1 in GPTQ's first format."""
    shape: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        per = 32 // self.bits
        require_dtype(self.qweight, _is_int32, "torch.int32")
        require_dtype(self.qzeros, _is_int32, "torch.int32")
        require_dtype(self.scale, _is_floating, "a floating-point dtype")
        first, second = _matrix(self.qweight)
        n, k = (second * per, first) if self.is_awq else (second, first * per)
        self.shape = (n, k)
        if self.group_size <= 0:
            self.group_size = max(k, 1)
        groups = group_count(k, self.group_size)
        because = f"its weight is of shape [{n}, {k}] with {self.bits} bits in groups of {self.group_size}"
        require_shape(self.scale, (groups, n), because)
        require_shape(self.qzeros, (groups, -(-n // per)), because)
        if self.g_idx is not None:
            require_shape(self.g_idx, (k,), because)
        self._index = None if self.g_idx is None else read(self.g_idx)

    def scales(self, rows: Range, columns: Range) -> Scales:
        """Returns the scales of a part."""
        per, groups = 32 // self.bits, self.scale.shape[0]
        name = self.qweight.name if self.g_idx is None else self.g_idx.name
        group = groups_of(self._index, columns, self.group_size, groups, name)
        words = read(self.qzeros, ((0, groups), (rows[0] // per, -(-rows[1] // per))))
        # Added to whole words, as it was subtracted from them: a zero of 0 borrows from the next one.
        offsets = sum(self.zero_offset << shift for shift in range(0, 32, self.bits))
        held = (rows[1] - rows[0], groups)
        if self.is_awq:
            zero = Words(words, held, self.bits, AWQ, rows[0] % per).codes()
        else:
            codes = unpacked(words + offsets, self.bits).flatten(1)
            zero = codes[:, rows[0] % per : rows[0] % per + held[0]].T
        scale = read(self.scale, ((0, groups), rows))
        return Scales(scale.T.contiguous(), zero.to(torch.int16).contiguous(), group)

    def codes(self, rows: Range, columns: Range) -> Words:
        """Returns the codes of a part."""
        per, shape = 32 // self.bits, (rows[1] - rows[0], columns[1] - columns[0])
        if self.is_awq:
            words = read(self.qweight, (columns, (rows[0] // per, -(-rows[1] // per))))
            return Words(words, shape, self.bits, AWQ, rows[0] % per)
        words = read(self.qweight, ((columns[0] // per, -(-columns[1] // per)), rows))
        return Words(words, shape, self.bits, BY_WORD, columns[0] % per)


@dataclass
class RowWords:
    """Words of compressed-tensors: successive inputs of an output, with scales of [outputs, groups]."""

    weight_packed: Source
    weight_scale: Source
    weight_zero_point: Source | None
    weight_g_idx: Source | None
    bits: int
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        n, k = self.shape
        per = 32 // self.bits
        require_dtype(self.weight_packed, _is_int32, "torch.int32")
        require_dtype(self.weight_scale, _is_floating, "a floating-point dtype")
        because = f"its weight is of shape [{n}, {k}] with {self.bits} bits"
        require_shape(self.weight_packed, (n, -(-k // per)), because)
        groups = check_row_scales(self.weight_scale, n, k, because)
        if self.weight_zero_point is not None:
            require_dtype(self.weight_zero_point, _is_int32, "torch.int32")
            require_shape(self.weight_zero_point, (-(-n // per), groups), because)
        if self.weight_g_idx is not None:
            require_shape(self.weight_g_idx, (k,), because)
        self._index = None if self.weight_g_idx is None else read(self.weight_g_idx)
        self._groups = groups

    def scales(self, rows: Range, columns: Range) -> Scales:
        """Returns the scales of a part."""
        per, groups = 32 // self.bits, self._groups
        name = self.weight_packed.name if self.weight_g_idx is None else self.weight_g_idx.name
        group = groups_of(self._index, columns, -(-self.shape[1] // groups), groups, name)
        scale = row_scales(self.weight_scale, rows, self.shape[0])
        zero = torch.full(scale.shape, 1 << self.bits - 1, dtype=torch.int16)
        if self.weight_zero_point is not None:
            first = rows[0] // per * per
            words = read(self.weight_zero_point, ((rows[0] // per, -(-rows[1] // per)), (0, groups)))
            zeros = unpacked(words, self.bits).transpose(1, 2).flatten(0, 1)
            zero = zeros[rows[0] - first : rows[1] - first].to(torch.int16)
        return Scales(scale, zero, group)

    def codes(self, rows: Range, columns: Range) -> Words:
        """Returns the codes of a part."""
        per, shape = 32 // self.bits, (rows[1] - rows[0], columns[1] - columns[0])
        words = read(self.weight_packed, (rows, (columns[0] // per, -(-columns[1] // per))))
        return Words(words, shape, self.bits, BY_ROW, columns[0] % per)


def check_row_scales(source: Source, n: int, k: int, because: str) -> int:
    """Returns the number of groups of scales of shape [n, groups], [n], [1] or [].

    Raises:
        CorruptModelError: they have another shape, or the groups cannot be equally long.
    """
    shape = tuple(source.shape)
    if shape in ((), (1,), (n,), (1, 1)):
        return 1
    groups = shape[1] if len(shape) == 2 and shape[0] == n else 0
    if groups == 0 or group_count(k, max(-(-k // groups), 1)) != groups:
        raise CorruptModelError(
            f"the tensor {source.name} is of shape {list(shape)}; {because}, which needs [{n}, groups]"
        )
    return groups


def row_scales(source: Source, rows: Range, n: int) -> Tensor:
    """Returns rows of the scales that :func:`check_row_scales` accepts, as [rows, groups]."""
    shape = tuple(source.shape)
    if shape == (n,) and n != 1:
        return read(source, (rows,)).view(-1, 1)
    if len(shape) == 2 and shape[0] == n:
        return read(source, (rows, (0, shape[1])))
    return read(source).reshape(1, 1).expand(rows[1] - rows[0], 1)


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
