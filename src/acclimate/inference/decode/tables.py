"""Functions of the position, computed by the captured operators themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acclimate.inference.decode.capture import Program, Role, Value
from acclimate.inference.decode.description import NotRepresentedError

# Operators that compute each position's result from that position alone: elementwise ones, those that move
# elements, and products that sum over another dimension.
_BY_POSITION = {
    "mul", "add", "sub", "div", "neg", "cos", "sin", "_to_copy", "pow", "exp", "log", "log1p", "floor", "sqrt",
    "rsqrt", "reciprocal", "clamp", "minimum", "maximum", "where", "rsub", "gt", "ge", "lt", "le", "bitwise_and",
    "cat", "stack", "view", "_unsafe_view", "transpose", "permute", "slice", "select", "split", "split_with_sizes",
    "unbind", "expand", "unsqueeze", "squeeze", "bmm", "clone", "repeat", "t", "logical_and", "logical_or",
    "bitwise_or", "bitwise_not", "ones_like", "full_like",
}  # fmt: skip


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
    if value.op == "bmm" and program.length != 1:
        # inv_freq (… x 1) @ positions (1 x length): the sum has one element, so positions do not mix.
        if value.args[0].shape[-1] != 1:
            raise NotRepresentedError("an angle is summed over positions")
    for item in _flat((*value.args, *value.kwargs.values())):
        if isinstance(item, Value):
            check_by_position(item, program, seen)


def fingerprint(value: Value, program: Program) -> Any:
    """Returns what a value computes, as nested tuples: the same for a prompt's program and a step's."""
    sizes = {program.batch, program.length, program.past}
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


def run(value: Value, program: Program, positions: Tensor) -> Tensor:
    """Computes a function of the positions.

    Args:
        value: the function, of a program whose number of tokens is symbolic.
        program: the program.
        positions: the positions, in the place of one sequence's tokens.
    """
    sizes = {program.batch: 1, program.length: len(positions)}
    known: dict[int, Any] = {}

    def of(item: Any) -> Any:
        if isinstance(item, Value):
            if item.op == "input":
                assert item.roles == Role.POSITIONS
                return positions[None]
            if item.op == "constant":
                assert item.tensor is not None
                return item.tensor.detach()
            key = id(item.args), item.op
            if key not in known:
                args = [of(a) for a in item.args]
                if item.op in ("view", "_unsafe_view"):  # copies between operators are left out
                    known[key] = args[0].reshape(args[1])
                else:
                    known[key] = item.overload(*args, **{n: of(v) for n, v in item.kwargs.items()})
            made = known[key]
            return made[item.output] if isinstance(made, (list, tuple)) else made
        if isinstance(item, tuple):
            return [of(each) for each in item]
        if hasattr(item, "free_symbols"):
            return int(item.subs(sizes))
        return item

    with torch.no_grad():
        found: Tensor = of(value)
    return found


def _flat(items: Any) -> Any:
    for item in items:
        if isinstance(item, tuple):
            yield from _flat(item)
        else:
            yield item
