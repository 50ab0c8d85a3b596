"""Functions of the position, computed by the captured operators themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from operator import mul
from typing import Any

import torch
from torch import Tensor

from acclimate.llm.decode.description import NotRepresentedError
from acclimate.llm.decode.program import Program, Value

# Operators that compute each position's result from that position alone: elementwise ones, those that move
# elements, and products that sum over another dimension.
_BY_POSITION = {
    "mul", "add", "sub", "div", "neg", "cos", "sin", "_to_copy", "pow", "exp", "log", "log1p", "floor",
    "sqrt", "rsqrt", "reciprocal", "clamp", "minimum", "maximum", "where", "rsub", "gt", "ge", "lt", "le",
    "bitwise_and", "bitwise_or", "bitwise_not", "logical_and", "logical_or", "ones_like", "full_like", "cat",
    "stack", "view", "_unsafe_view", "transpose", "permute", "slice", "select", "split", "split_with_sizes",
    "unbind", "expand", "unsqueeze", "squeeze", "bmm", "repeat", "t", "polar", "view_as_real",
}  # fmt: skip

_ON_CONSTANTS = {"arange", "full", "ones", "zeros", "scalar_tensor"}
"""Further operators that compute what an angle is made of without positions."""


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
    for item in _flat((*value.args, *value.kwargs.values())):
        if isinstance(item, Value):
            check_by_position(item, program, seen)


def fingerprint(value: Value, *sizes: Any) -> Any:
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
                    known[id(item)] = (item.op, of(item.args[0]))
                else:
                    known[id(item)] = (
                        item.op, item.output, item.dtype, tuple(of(a) for a in item.args),
                        tuple((n, of(v)) for n, v in sorted(item.kwargs.items()) if n != "pin_memory"),
                    )  # fmt: skip
            return known[id(item)]
        if isinstance(item, tuple):
            return tuple(of(each) for each in item)
        return "size" if item in sizes and hasattr(item, "free_symbols") else item

    return of(value)


@dataclass(frozen=True)
class PositionColumns:
    """Some columns of a function of the positions, which the captured operators compute.

    Two are equal if they compute the same, in whichever program they were captured.
    """

    batch: Any = field(compare=False)
    """The symbol of the number of sequences."""
    length: Any = field(compare=False)
    """The symbol of the number of tokens."""
    value: Value = field(compare=False)
    columns: tuple[int, ...]
    computes: Any
    """The value's fingerprint."""

    def __call__(self, positions: Tensor) -> Tensor:
        """Returns positions x columns."""
        with torch.no_grad():
            found = _Run({self.batch: 1, self.length: len(positions)}, positions)(self.value)
        axis = self.value.shape.index(self.length)
        by_position: Tensor = found.movedim(axis, 0).reshape(len(positions), -1)
        return by_position[:, list(self.columns)]


class _Run:
    """Computes values with positions in the place of one sequence's tokens."""

    def __init__(self, sizes: dict[Any, int], positions: Tensor) -> None:
        self._sizes, self._positions = sizes, positions
        self._known: dict[int, Any] = {}

    def __call__(self, item: Any) -> Any:
        if isinstance(item, Value):
            return self._value(item)
        if isinstance(item, tuple):
            return [self(each) for each in item]
        return int(item.subs(self._sizes)) if hasattr(item, "free_symbols") else item

    def _value(self, item: Value) -> Any:
        if item.op == "input":
            return self._positions[None]
        if item.tensor is not None:
            return item.tensor.detach()
        if id(item.args) not in self._known:
            args = [self(each) for each in item.args]
            if item.op in ("view", "_unsafe_view"):  # copies between operators are left out
                made = args[0].reshape(args[1])
            else:
                made = item.overload(*args, **{n: self(v) for n, v in item.kwargs.items()})
            self._known[id(item.args)] = made
        made = self._known[id(item.args)]
        return made[item.output] if isinstance(made, (list, tuple)) else made


# -- as text ---------------------------------------------------------------------------------------------


def columns_as_json(columns: PositionColumns, name_of: Callable[[Tensor], str]) -> dict[str, Any]:
    """Returns what :func:`columns_from_json` reads; ``name_of`` names the model's tensors."""
    values: list[Value] = []
    numbers: dict[int, int] = {}

    def text(item: Any) -> Any:
        if isinstance(item, Value):
            if id(item) not in numbers:
                for each in _flat((*item.args, *item.kwargs.values())):
                    text(each)
                numbers[id(item)] = len(values)
                values.append(item)
            return {"value": numbers[id(item)]}
        if isinstance(item, tuple):
            return [text(each) for each in item]
        if isinstance(item, (torch.dtype, torch.device)):
            return {type(item).__name__: str(item).removeprefix("torch.")}
        return {"size": str(item)} if hasattr(item, "free_symbols") else item

    text(columns.value)
    written = [
        {
            "op": value.op,
            "overload": None if value.overload is None else value.overload._overloadname,
            "args": text(value.args),
            "kwargs": {n: text(v) for n, v in value.kwargs.items()},
            "output": value.output,
            "shape": text(value.shape),
            "dtype": text(value.dtype),
            "roles": value.roles,
            "tensor": None if value.tensor is None else name_of(value.tensor),
        }
        for value in values
    ]
    return {
        "values": written,
        "columns": list(columns.columns),
        "sizes": [str(columns.batch), str(columns.length)],
    }


def columns_from_json(made: dict[str, Any], tensors: dict[str, Tensor]) -> PositionColumns:
    """Reads what :func:`columns_as_json` wrote.

    Raises a ValueError, LookupError, AttributeError or TypeError for anything else.
    """
    batch, length = (_Size(name) for name in made["sizes"])
    values: list[Value] = []

    def item(text: Any) -> Any:
        if isinstance(text, list):
            return tuple(item(each) for each in text)
        if not isinstance(text, dict):
            return text
        ((kind, value),) = text.items()
        if kind == "value":
            return values[value]
        if kind == "device":
            return torch.device(value)
        if kind == "dtype":
            return getattr(torch, value)
        return _Size(value)

    for text in made["values"]:
        op, overload = text["op"], None
        if op not in ("input", "constant"):
            if op not in _BY_POSITION | _ON_CONSTANTS:
                raise ValueError(f"{op} is not an operator of angles")
            overload = getattr(getattr(torch.ops.aten, op), text["overload"] or "default")
        tensor = None if text["tensor"] is None else tensors[text["tensor"]]
        values.append(
            Value(
                op, overload, item(text["args"]), {n: item(v) for n, v in text["kwargs"].items()},
                text["output"], item(text["shape"]), item(text["dtype"]), text["roles"], tensor,
            )
        )  # fmt: skip
    value = values[-1]
    return PositionColumns(batch, length, value, tuple(made["columns"]), fingerprint(value, batch, length))


class _Size:
    """A symbolic size that was read from text: a product of symbols and numbers, such as ``2*s3``.

    It has what this module uses of sympy's expressions, whose import takes longer than reading a description.
    """

    def __init__(self, text: str) -> None:
        parts = text.split("*")
        if not all(part.isidentifier() or part.isdecimal() for part in parts):
            raise ValueError(f"{text} is not a size")
        self.text = text
        self.free_symbols = {part for part in parts if part.isidentifier()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Size) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text

    def subs(self, sizes: dict[Any, int]) -> int:
        """Returns the number for given sizes."""
        known = {each.text: number for each, number in sizes.items()}
        return reduce(mul, (known[part] if part in known else int(part) for part in self.text.split("*")))


def _flat(items: Any) -> Any:
    for item in items:
        if isinstance(item, tuple):
            yield from _flat(item)
        else:
            yield item
