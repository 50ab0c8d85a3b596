"""A deferred matrix as rows and columns of matrices in files, if it is nothing but a part of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from acclimate.llm.files.deferred_tensors import DeferredTensor, Source

_aten = torch.ops.aten
_SAME = (
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten.lift_fresh.default,
    _aten._to_copy.default,
)


@dataclass(frozen=True)
class MatrixPart:
    """Rows of matrices below one another, with the same columns of each."""

    rows: tuple[tuple[Source, int, int], ...]
    """Matrices of files, each with its first row and the one after the last."""
    columns: tuple[tuple[int, int], ...]
    """The ranges of their columns, beside one another."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows = sum(stop - start for _, start, stop in self.rows)
        return rows, sum(stop - start for start, stop in self.columns)

    @property
    def sources(self) -> list[Source]:
        """The matrices."""
        return [source for source, _, _ in self.rows]


def matrix_part(
    tensor: torch.Tensor, accepts: Callable[[Source], bool], *, row_dim: int = 0, column_dim: int = 1
) -> MatrixPart | None:
    """Returns a deferred matrix, or matrices of experts, as a part of those in files.

    Args:
        tensor: the matrix.
        accepts: whether a tensor of a file is a matrix whose rows and columns can be taken.
        row_dim: the dimension that counts rows; one of experts may come before.
        column_dim: the one that counts columns.

    Returns:
        ``None`` if the matrix is something else, or if a file's tensor is not accepted.
    """
    tensor, count = same_values(tensor), max(row_dim, column_dim) + 1
    if not isinstance(tensor, DeferredTensor) or tensor.dim() != count:
        return None
    if tensor.source is not None:
        if not accepts(tensor.source):
            return None
        rows = tensor.source, 0, tensor.shape[row_dim]
        return MatrixPart((rows,), ((0, tensor.shape[column_dim]),))
    if tensor.operator is _aten.slice.Tensor:
        origin, dim, start, stop, step = operator_arguments(tensor)
        found = matrix_part(origin, accepts, row_dim=row_dim, column_dim=column_dim)
        if found is None or step != 1 or dim % count not in (row_dim, column_dim):
            return None
        first, last, _ = slice(start, stop).indices(origin.shape[dim])
        return (_rows if dim % count == row_dim else _columns)(found, first, last)
    if tensor.operator is _aten.cat.default:
        parts, dim = operator_arguments(tensor)
        if dim % count not in (row_dim, column_dim):
            return None
        pieces = [matrix_part(part, accepts, row_dim=row_dim, column_dim=column_dim) for part in parts]
        return _joined(pieces, is_below=dim % count == row_dim)
    return None


def same_values(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the deferred tensor whose values a deferred tensor has, perhaps in another dtype."""
    while isinstance(tensor, DeferredTensor) and tensor.operator in _SAME:
        tensor = tensor.arguments[0]
    return tensor


def operator_arguments(tensor: DeferredTensor) -> tuple[Any, ...]:
    """Returns an operator's arguments by position, with defaults for omitted ones."""
    given = dict(
        zip((argument.name for argument in tensor.operator._schema.arguments), tensor.arguments, strict=False)
    )
    given |= tensor.options
    return tuple(
        given.get(argument.name, argument.default_value) for argument in tensor.operator._schema.arguments
    )


def _within(ranges: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int, int]]:
    """Returns the pieces of ranges beside one another that lie between two places, with their numbers."""
    found, at = [], 0
    for number, (start, stop) in enumerate(ranges):
        begin, end = max(first, at), min(last, at + stop - start)
        if begin < end:
            found.append((number, start + begin - at, start + end - at))
        at += stop - start
    return found


def _rows(part: MatrixPart, first: int, last: int) -> MatrixPart | None:
    chosen = _within([(start, stop) for _, start, stop in part.rows], first, last)
    if not chosen:
        return None
    return replace(part, rows=tuple((part.rows[number][0], start, stop) for number, start, stop in chosen))


def _columns(part: MatrixPart, first: int, last: int) -> MatrixPart | None:
    chosen = _within(list(part.columns), first, last)
    return replace(part, columns=tuple((start, stop) for _, start, stop in chosen)) if chosen else None


def _joined(parts: list[MatrixPart | None], *, is_below: bool) -> MatrixPart | None:
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    first = found[0]
    if is_below:
        if any(part.columns != first.columns for part in found):
            return None
        return replace(first, rows=tuple(rows for part in found for rows in part.rows))
    same = all(
        len(part.rows) == len(first.rows)
        and all(
            one[0] is other[0] and one[1:] == other[1:]
            for one, other in zip(part.rows, first.rows, strict=True)
        )
        for part in found
    )
    return replace(first, columns=tuple(piece for part in found for piece in part.columns)) if same else None
