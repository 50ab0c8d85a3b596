"""Functions of the position, computed by the captured operators themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from acclimate.llm.decode.description import NotRepresentedError
from acclimate.llm.decode.elements import ELEMENTWISE, MOVES
from acclimate.llm.decode.program import Program, Value

# Operators that compute each position's result from that position alone: elementwise ones, those that move
# elements, except for the order of tokens, and products that sum over another dimension.
_BY_POSITION = ELEMENTWISE | MOVES - {"flip"} | {
    "gt", "ge", "lt", "le", "bitwise_and", "bitwise_or", "bitwise_not", "logical_and", "logical_or",
    "ones_like", "full_like", "cat", "stack", "bmm", "polar", "view_as_real", "slice_scatter",
    "select_scatter",
}  # fmt: skip
OPERATORS = _BY_POSITION | {"arange", "full", "ones", "zeros", "scalar_tensor"}
"""The operators that compute angles; the last ones compute without positions."""


def check_by_position(value: Value, program: Program, seen: set[int] | None = None) -> None:
    """Raises :class:`NotRepresentedError` unless a value at a position depends on that position alone."""
    seen = set() if seen is None else seen
    if id(value) in seen or value.roles == 0:
        return
    seen.add(id(value))
    if value.op == "input":
        return
    if value.op not in _BY_POSITION:
        raise NotRepresentedError(f"an angle is computed with {value.op}")
    # inv_freq (... x 1) @ positions (1 x length): the sum has one element, so positions do not mix.
    if value.op == "bmm" and program.length != 1 and value.args[0].shape[-1] != 1:
        raise NotRepresentedError("an angle is summed over positions")
    for item in flattened((*value.args, *value.kwargs.values())):
        if isinstance(item, Value):
            check_by_position(item, program, seen)


def _fingerprint(value: Value, *sizes: Any) -> Any:
    """Returns what a value computes, as nested tuples: the same for a prompt's program and a step's.

    Args:
        value: a function of the positions.
        sizes: the symbols of the numbers of sequences and tokens, whose place other programs give to others.
    """
    known: dict[int, Any] = {}

    def of(item: Any) -> Any:
        if isinstance(item, Value):
            if id(item) not in known:
                if item.op == "input":
                    known[id(item)] = ("input", item.roles)
                elif item.op == "constant":
                    known[id(item)] = ("constant", id(item.tensor))
                elif item.op in ("view", "_unsafe_view", "expand"):  # their arguments are sizes
                    own = tuple(size for size in item.shape if isinstance(size, int) and size != 1)
                    known[id(item)] = (item.op, own, of(item.args[0]))
                else:
                    known[id(item)] = (
                        item.op, item.output, item.dtype, tuple(of(a) for a in item.args),
                        tuple((n, of(v)) for n, v in sorted(item.kwargs.items()) if n != "pin_memory"),
                    )  # fmt: skip
            return known[id(item)]
        if isinstance(item, tuple):
            return tuple(of(part) for part in item)
        return "size" if item in sizes and hasattr(item, "free_symbols") else item

    return of(value)


@dataclass(frozen=True, eq=False)
class PositionColumns:
    """Some columns of a function of the positions, which the captured operators compute.

    Two are equal if they compute the same, in whichever program they were captured.
    """

    batch: Any
    """The symbol of the number of sequences."""
    length: Any
    """The symbol of the number of tokens; 1: positions are those of several sequences."""
    past: Any
    """The number of earlier tokens."""
    value: Value
    columns: tuple[int, ...]
    factor: float = 1.0
    """What all of them are multiplied by: 1 or -1, which rounds nothing."""

    @cached_property
    def _indices(self) -> dict[torch.device, Tensor]:
        """The columns on each device; one that captures a graph can read none from the host."""
        return {}

    @cached_property
    def _computes(self) -> Any:
        return self.columns, self.factor, _fingerprint(self.value, self.batch, self.length, self.past)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The model's tensors of which it is computed."""
        found: dict[int, Value] = {}
        left: list[Any] = [self.value]
        while left:
            item = left.pop()
            if isinstance(item, Value) and id(item) not in found:
                found[id(item)] = item
                left += flattened((*item.args, *item.kwargs.values()))
        return [value.tensor for value in found.values() if value.tensor is not None]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PositionColumns) and self._computes == other._computes

    def __hash__(self) -> int:
        return hash(self.columns)

    def __call__(self, positions: Tensor) -> Tensor:
        """Returns positions x columns."""
        along, sizes = self.batch, {self.batch: len(positions)}
        if self.length != 1:
            along, sizes = self.length, {self.batch: 1, self.length: len(positions)}
        given = positions[:, None] if self.length == 1 else positions[None]
        with torch.no_grad():
            found = _Run(sizes, given)(self.value)
        axis = self.value.shape.index(along)
        by_position: Tensor = found.movedim(axis, 0).reshape(len(positions), -1)
        if by_position.device not in self._indices:
            self._indices[by_position.device] = torch.tensor(self.columns, device=by_position.device)
        return by_position.index_select(1, self._indices[by_position.device]) * self.factor


class _Run:
    """Computes values with positions in the place of tokens: sequences x tokens."""

    def __init__(self, sizes: dict[Any, int], positions: Tensor) -> None:
        self._sizes, self._positions = sizes, positions
        self._known: dict[int, Any] = {}

    def __call__(self, item: Any) -> Any:
        if isinstance(item, Value):
            return self._value(item)
        if isinstance(item, tuple):
            return [self(part) for part in item]
        return int(item.subs(self._sizes)) if hasattr(item, "free_symbols") else item

    def _value(self, item: Value) -> Any:
        if item.op == "input":
            return self._positions
        if item.tensor is not None:
            return item.tensor.detach()
        if id(item.args) not in self._known:
            args = [self(argument) for argument in item.args]
            if item.op in ("view", "_unsafe_view"):  # copies between operators are left out
                made = args[0].reshape(args[1])
            else:
                made = item.overload(*args, **{n: self(v) for n, v in item.kwargs.items()})
            self._known[id(item.args)] = made
        made = self._known[id(item.args)]
        return made[item.output] if isinstance(made, (list, tuple)) else made


def flattened(items: Any) -> Iterator[Any]:
    """Yields the items of nested tuples."""
    for item in items:
        if isinstance(item, tuple):
            yield from flattened(item)
        else:
            yield item
