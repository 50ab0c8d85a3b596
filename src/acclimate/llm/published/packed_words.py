"""Matrices whose codes are packed into 32-bit words: those of GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from acclimate.errors import CorruptModelError
from acclimate.llm.files.deferred_tensors import Source
from acclimate.llm.kernels.words import AWQ, BY_ROW, BY_WORD, Words, unpacked
from acclimate.llm.published.numbers import Range, Scales, read, require_dtype, require_shape


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
        if len(self.qweight.shape) != 2:
            raise CorruptModelError(
                f"the tensor {self.qweight.name} is of shape {list(self.qweight.shape)}, not a matrix"
            )
        first, second = self.qweight.shape
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
