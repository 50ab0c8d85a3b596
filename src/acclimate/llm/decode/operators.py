"""Reads single operators of a captured program, and activations that are written with several."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

from acclimate.llm.decode.description import NotRepresentedError
from acclimate.llm.decode.elements import MOVES, constant_of
from acclimate.llm.decode.program import Value


def widened(value: Value) -> Value:
    """Returns what was converted to another floating-point dtype, through any number of conversions."""
    while value.op == "_to_copy" and value.dtype.is_floating_point and value.args[0].dtype.is_floating_point:
        value = value.args[0]
    return value


def flat(value: Value) -> Value:
    """Returns what has the same rows, with sequences and tokens in one dimension or in two."""
    while value.op in ("view", "_unsafe_view", "reshape") and value.shape[-1] == value.args[0].shape[-1]:
        value = value.args[0]
    return value


def orders(value: Value) -> Iterator[tuple[Any, Any]]:
    """Yields an operator's two operands in both orders."""
    first, second = value.args[:2]
    yield first, second
    if isinstance(second, Value):
        yield second, first


def times_constant(value: Value) -> tuple[Value, float] | None:
    """Returns what a value is multiplied or divided by, if that is one number."""
    if value.op == "div":
        by = constant_of(value.args[1])
        return None if by is None or len(value.args) > 2 or value.kwargs else (value.args[0], 1.0 / by)
    if value.op == "mul":
        for operand, other in orders(value):
            by = constant_of(other)
            if by is not None and isinstance(operand, Value):
                return operand, by
    return None


def is_mean(value: Any, of: Value) -> bool:
    """Whether a value is the mean of another over its last dimension, which stays as one element."""
    if not isinstance(value, Value) or value.op != "mean" or value.args[0] is not of or len(value.args) < 3:
        return False
    return value.args[1] in ((-1,), (len(of.shape) - 1,)) and value.args[2] is True


# -- activations -----------------------------------------------------------------------------------------


def activation_of(value: Value) -> tuple[str, Value] | None:
    """Returns which activation of ``ACTIVATIONS`` a value is, and of what."""
    if value.op in ("silu", "relu"):
        return value.op, value.args[0]
    if value.op == "gelu":
        kind = value.kwargs.get("approximate", value.args[1] if len(value.args) > 1 else "none")
        return {"none": "gelu", "tanh": "gelu_tanh"}[kind], value.args[0]
    if value.op == "pow" and value.args[1] == 2 and value.args[0].op == "relu":
        return "relu2", value.args[0].args[0]
    if value.op == "mul" and value.args[0] is value.args[1] and value.args[0].op == "relu":
        return "relu2", value.args[0].args[0]
    return _composed_gelu(value)


_Sum = dict[tuple[int, int], float]
"""The factor of each product of powers of x and of a tanh, by the two exponents."""
_ROOT = math.sqrt(2 / math.pi)
_IN_TANH: _Sum = {(1, 0): _ROOT, (3, 0): 0.044715 * _ROOT}
_GELU: _Sum = {(1, 0): 0.5, (1, 1): 0.5}


def _composed_gelu(value: Value) -> tuple[str, Value] | None:
    """Reads 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), written with several operators."""
    leaves: dict[int, Value] = {}

    def read(item: Any) -> _Sum:
        if not isinstance(item, Value):
            return {(0, 0): float(item)}
        if item.op == "mul":
            return _product(read(item.args[0]), read(item.args[1]))
        if item.op == "add":
            first, second = read(item.args[0]), read(item.args[1])
            return {
                powers: first.get(powers, 0.0) + second.get(powers, 0.0) for powers in {**first, **second}
            }
        if item.op == "pow" and item.args[1] in (2, 3):
            return reduce(_product, [read(item.args[0])] * int(item.args[1]))
        if item.op == "tanh" and _is_close(read(item.args[0]), _IN_TANH):
            return {(0, 1): 1.0}
        if item.op in ("linear", *MOVES):
            leaves[id(item)] = item
            return {(1, 0): 1.0}
        raise NotRepresentedError(f"an activation is computed with {item.op}")

    try:
        found = read(value) if value.op == "mul" else {}
    except (NotRepresentedError, TypeError, ValueError):
        return None
    return (
        ("gelu_tanh", next(iter(leaves.values()))) if _is_close(found, _GELU) and len(leaves) == 1 else None
    )


def _product(first: _Sum, second: _Sum) -> _Sum:
    found: _Sum = {}
    for (i, j), a in first.items():
        for (k, n), b in second.items():
            found[i + k, j + n] = found.get((i + k, j + n), 0.0) + a * b
    return found


def _is_close(found: _Sum, expected: _Sum) -> bool:
    return found.keys() == expected.keys() and all(
        math.isclose(factor, expected[powers], rel_tol=1e-6) for powers, factor in found.items()
    )
