"""Reads single operators of a captured program, and activations that are written with several."""

from __future__ import annotations

import math
from collections.abc import Iterator
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


def _composed_gelu(value: Value) -> tuple[str, Value] | None:
    """Reads 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), written with several operators."""
    import sympy

    leaves: dict[int, Value] = {}

    def read(item: Any) -> Any:
        if not isinstance(item, Value):
            return _rounded(float(item))
        if item.op == "mul":
            return read(item.args[0]) * read(item.args[1])
        if item.op == "add" and item.kwargs.get("alpha", 1) == 1:
            return read(item.args[0]) + read(item.args[1])
        if item.op == "pow" and not isinstance(item.args[1], Value):
            return read(item.args[0]) ** int(item.args[1])
        if item.op == "tanh":
            return sympy.Function("tanh")(sympy.expand(read(item.args[0])))
        if item.op in ("linear", *MOVES):
            leaves[id(item)] = item
            return sympy.Symbol("x")
        raise NotRepresentedError(f"an activation is computed with {item.op}")

    if value.op != "mul":
        return None
    try:
        found = sympy.expand(read(value))
    except (NotRepresentedError, TypeError, ValueError):
        return None
    x = sympy.Symbol("x")
    inner = sympy.expand(_rounded(math.sqrt(2 / math.pi)) * (x + _rounded(0.044715) * x**3))
    expected = sympy.expand(_rounded(0.5) * x * (1 + sympy.Function("tanh")(inner)))
    if len(leaves) != 1 or not _is_close(found, expected):
        return None
    return "gelu_tanh", next(iter(leaves.values()))


def _rounded(number: float) -> Any:
    import sympy

    return sympy.Rational(round(number * 10**9), 10**9)


def _is_close(first: Any, second: Any) -> bool:
    """Whether two sums have the same terms, with factors that differ by less than a millionth."""
    import sympy

    def rough(expression: Any) -> Any:
        return expression.replace(lambda e: e.is_Number, lambda e: sympy.Float(float(e), 6))

    return bool(str(rough(first)) == str(rough(second)))
