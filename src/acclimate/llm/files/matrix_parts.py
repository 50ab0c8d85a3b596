"""Deferred matrices as rows and columns of tensors in files, if they are nothing but parts of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch

from acclimate.llm.files.deferred_tensors import DeferredTensor, Source, operator_arguments, same_values

_aten = torch.ops.aten


@dataclass(frozen=True)
class MatrixPart:
    """Rows of tensors in files below one another, with the same columns of each."""

    rows: tuple[tuple[Source, int, int], ...]
    """Tensors, each with its first row and the one after the last; a stack's matrices follow one another."""
    columns: tuple[tuple[int, int], ...]
    """The ranges of their columns, beside one another."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows = sum(stop - start for _, start, stop in self.rows)
        return rows, sum(stop - start for start, stop in self.columns)

    @property
    def sources(self) -> list[Source]:
        """The tensors."""
        return [source for source, _, _ in self.rows]

    def between(self, axis: int, first: int, last: int) -> MatrixPart | None:
        """Returns the rows (axis -2) or columns (axis -1) between two places; ``None``: there are none."""
        if axis == -2:
            found = _within([rows[1:] for rows in self.rows], first, last)
            rows = tuple((self.rows[number][0], start, stop) for number, start, stop in found)
            return replace(self, rows=rows) if rows else None
        columns = tuple((start, stop) for _, start, stop in _within(self.columns, first, last))
        return replace(self, columns=columns) if columns else None


def matrix_parts(
    tensor: torch.Tensor, accepts: Callable[[Source], bool], *, is_turned: bool = False
) -> list[MatrixPart] | None:
    """Returns a deferred matrix, or each matrix of a deferred stack, as a part of tensors in files.

    Args:
        tensor: the matrix or stack.
        accepts: whether rows and columns of a file's tensor can be taken.
        is_turned: whether the last dimension counts rows, and the one before columns.

    Returns:
        ``None`` if the tensor is something else, or if a file's tensor is not accepted.
    """
    tensor = same_values(tensor)
    if not isinstance(tensor, DeferredTensor) or tensor.dim() not in (2, 3):
        return None
    if tensor.source is not None:
        if not accepts(tensor.source):
            return None
        height, width = tensor.shape[:-3:-1] if is_turned else tensor.shape[-2:]
        starts = range(0, tensor.shape[:-2].numel() * height, height) if height else ()
        return [MatrixPart(((tensor.source, at, at + height),), ((0, width),)) for at in starts]
    if tensor.operator is _aten.slice.Tensor:
        origin, dim, start, stop, step = operator_arguments(tensor)
        found = matrix_parts(origin, accepts, is_turned=is_turned)
        if found is None or step != 1:
            return None
        first, last, _ = slice(start, stop).indices(origin.shape[dim])
        axis = _axis(dim, tensor, is_turned)
        if axis == -3:
            return found[first:last]
        return _complete(part.between(axis, first, last) for part in found)
    if tensor.operator in (_aten.cat.default, _aten.stack.default):
        parts, dim = operator_arguments(tensor)
        found_parts = _complete(matrix_parts(part, accepts, is_turned=is_turned) for part in parts)
        axis = _axis(dim, tensor, is_turned)
        if found_parts is None:
            return None
        if axis == -3:
            return [matrix for matrices in found_parts for matrix in matrices]
        if tensor.operator is _aten.cat.default:
            return _complete(_joined(matrices, axis) for matrices in zip(*found_parts, strict=True))
    return None


def _axis(dim: int, tensor: torch.Tensor, is_turned: bool) -> int:
    """Returns what a dimension counts: -1: columns, -2: rows, -3: matrices."""
    axis = dim % tensor.dim() - tensor.dim()
    return -3 - axis if is_turned and axis > -3 else axis


_Any = TypeVar("_Any")


def _complete(found: Iterable[_Any | None]) -> list[_Any] | None:
    """Returns what was found; ``None`` if something was not."""
    listed = list(found)
    return None if any(item is None for item in listed) else cast("list[_Any]", listed)


def _within(ranges: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int, int]]:
    """Returns the pieces of ranges beside one another that lie between two places, with their numbers."""
    found, at = [], 0
    for number, (start, stop) in enumerate(ranges):
        begin, end = max(first, at), min(last, at + stop - start)
        if begin < end:
            found.append((number, start + begin - at, start + end - at))
        at += stop - start
    return found


def _joined(parts: tuple[MatrixPart, ...], axis: int) -> MatrixPart | None:
    first = parts[0]
    if axis == -2:
        if any(part.columns != first.columns for part in parts):
            return None
        return replace(first, rows=tuple(rows for part in parts for rows in part.rows))
    if any(part.rows != first.rows for part in parts):
        return None
    return replace(first, columns=tuple(piece for part in parts for piece in part.columns))
