"""Follows the elements of tensors through operators that only move, negate, add and rotate them.

Such an operator does the same whatever the values are, so applying it to the elements' places once, for small
sizes, says exactly which element of which earlier tensor every element is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import mul
from typing import Any

import torch
from torch import Tensor

from acclimate.llm.decode.description import NotRepresentedError
from acclimate.llm.decode.program import Program, Role, Value

MOVES = {
    "view", "_unsafe_view", "reshape", "transpose", "permute", "t", "slice", "select", "split",
    "split_with_sizes", "unbind", "expand", "unsqueeze", "squeeze", "repeat", "flip",
}  # fmt: skip
"""Operators on one tensor whose results are elements of it."""
BATCH, LENGTH = 2, 3
"""The sizes with which programs are followed."""


@dataclass
class Term:
    """One summand of every element of a tensor: a number times an element of an earlier one, and of up to two
    tables. Each field has the tensor's shape; tables count from one, and zero is no table."""

    factor: Tensor
    origin: Tensor
    place: Tensor
    tables: Tensor
    """Shape x 2: the tables' numbers."""
    columns: Tensor
    """Shape x 2: places in them."""

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Term:
        """Returns the term with an operator applied to every field."""
        return Term(
            change(self.factor),
            change(self.origin),
            change(self.place),
            torch.stack([change(self.tables[..., i]) for i in (0, 1)], -1),
            torch.stack([change(self.columns[..., i]) for i in (0, 1)], -1),
        )


class Elements:
    """Follows the values of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.origins: list[Value] = []
        """The values that terms refer to by their index: those whose operators do more than move."""
        self.rounds: dict[int, bool] = {}
        self._numbers: dict[int, int] = {}
        self._sizes = {program.batch: BATCH}
        if program.length != 1:
            self._sizes[program.length] = LENGTH
        elif program.past != 0:
            self._sizes[next(iter(program.past.free_symbols))] = LENGTH
        self._known_sizes: dict[Any, int] = {}
        self._identities: dict[int, Tensor] = {}
        self._as_real: dict[int, Value] = {}
        self._known: dict[Any, int] = {}

    def size(self, expression: Any) -> Any:
        """Returns an argument with numbers in place of symbolic sizes."""
        if isinstance(expression, tuple):
            return [self.size(each) for each in expression]
        if hasattr(expression, "free_symbols"):
            if expression not in self._known_sizes:
                self._known_sizes[expression] = int(expression.subs(self._sizes))
            return self._known_sizes[expression]
        return expression

    def shape(self, value: Value) -> list[int]:
        """Returns a value's shape with numbers in place of symbolic sizes."""
        return [self.size(each) for each in value.shape]

    def number(self, value: Value) -> int:
        """Returns the index of a value in ``origins``."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.origins)
            self.origins.append(value)
        return self._numbers[id(value)]

    def moved(self, value: Value) -> tuple[Value, Tensor]:
        """Returns the value whose elements a value consists of, and their places there."""
        if value.op in MOVES:
            source, places = self.moved(value.args[0])
            return source, self._move(value, places)
        return value, torch.arange(reduce(mul, self.shape(value), 1)).reshape(self.shape(value))

    def _move(self, value: Value, tensor: Tensor) -> Tensor:
        if value.op in ("view", "_unsafe_view", "reshape"):
            return tensor.reshape(self.shape(value))
        if value.op == "expand":
            return tensor.expand(self.shape(value))
        moved = value.overload(
            tensor,
            *(self.size(each) for each in value.args[1:]),
            **{n: self.size(v) for n, v in value.kwargs.items()},
        )
        found: Tensor = moved[value.output] if isinstance(moved, (list, tuple)) else moved
        return found

    # -- sums of elements ------------------------------------------------------------------------------

    def terms(self, value: Value, is_origin: Callable[[Value], bool]) -> list[Term]:
        """Returns the summands of a value's elements.

        Args:
            value: the value.
            is_origin: whether a value's elements are to be followed no further.
        """
        if is_origin(value):
            return [self._origin(value)]
        if value.op in MOVES:
            return [t.mapped(lambda x: self._move(value, x)) for t in self.terms(value.args[0], is_origin)]
        if value.op == "_to_copy" and value.dtype.is_floating_point:
            return self.terms(value.args[0], is_origin)
        if value.op in ("cat", "stack"):
            return self._joined(value, is_origin)
        if value.op == "slice_scatter":
            return self._scattered(value, is_origin)
        if value.op == "view_as_real" and (turned := self._turned_as_complex(value, is_origin)) is not None:
            return turned
        if value.op == "neg":
            return [_scaled(t, -1.0) for t in self.terms(value.args[0], is_origin)]
        if value.op in ("add", "sub") and _is_plain_sum(value):
            first, second = (self.terms(each, is_origin) for each in value.args[:2])
            sign = 1.0 if value.op == "add" else -1.0
            shape = self.shape(value)
            return [
                t.mapped(lambda x: x.expand(shape)) for t in (*first, *(_scaled(t, sign) for t in second))
            ]
        if value.op in ("mul", "div"):
            return self._multiplied(value, is_origin)
        return [self._origin(value)]

    def _origin(self, value: Value) -> Term:
        shape = self.shape(value)
        places = torch.arange(reduce(mul, shape, 1)).reshape(shape)
        none = torch.zeros((*shape, 2), dtype=torch.long)
        number = torch.full(shape, self.number(value))
        return Term(torch.ones(shape, dtype=torch.float64), number, places, none, none.clone())

    def _joined(self, value: Value, is_origin: Callable[[Value], bool]) -> list[Term]:
        parts = [self.terms(each, is_origin) for each in value.args[0]]
        most = max(len(each) for each in parts)
        parts = [[*part, *[_scaled(part[0], 0.0)] * (most - len(part))] for part in parts]
        dim = value.args[1] if len(value.args) > 1 else value.kwargs.get("dim", 0)
        rank = len(value.shape)
        join = torch.cat if value.op == "cat" else torch.stack
        dim %= rank

        def joined(index: int) -> Term:
            own = [part[index] for part in parts]
            return Term(*(join([getattr(t, name) for t in own], dim) for name in Term.__dataclass_fields__))

        return [joined(index) for index in range(most)]

    def _scattered(self, value: Value, is_origin: Callable[[Value], bool]) -> list[Term]:
        """Follows a tensor of which some elements are another's."""
        parts = [self.terms(operand, is_origin) for operand in value.args[:2]]
        most = max(len(part) for part in parts)
        whole, some = ([*part, *[_scaled(part[0], 0.0)] * (most - len(part))] for part in parts)
        given: list[Any] = [*value.args[2:], *(0, None, None, 1)[len(value.args) - 2 :]]
        dim, start, stop, step = given
        where = [slice(None)] * len(value.shape)
        where[dim] = slice(self.size(start), self.size(stop), step)

        def written(to: Tensor, own: Tensor) -> Tensor:
            made = to.clone()
            made[tuple(where)] = own
            return made

        return [
            Term(*(written(getattr(a, name), getattr(b, name)) for name in Term.__dataclass_fields__))
            for a, b in zip(whole, some, strict=True)
        ]

    def _turned_as_complex(self, value: Value, is_origin: Callable[[Value], bool]) -> list[Term] | None:
        """Follows pairs of elements that are multiplied by a complex table, as complex numbers."""
        product = value.args[0]
        if product.op != "mul" or not all(isinstance(operand, Value) for operand in product.args[:2]):
            return None
        for pairs, table in (product.args[:2], product.args[1::-1]):
            if pairs.op != "view_as_complex" or table.roles != Role.POSITIONS or not table.dtype.is_complex:
                continue
            number, places = self._complex_table(table)
            shape = self.shape(value)
            real, imaginary = (places[..., i, None].expand(shape) for i in (0, 1))
            terms = self.terms(pairs.args[0], is_origin)
            if any(bool((term.tables > 0).any()) for term in terms):
                raise NotRepresentedError("an element is rotated twice")
            turned = [t.mapped(lambda x: x.flip(-1)) for t in terms]
            signs = torch.tensor([-1.0, 1.0], dtype=torch.float64)
            return [
                *(_by_table(term, number, real) for term in terms),
                *(replace(_by_table(term, number, imaginary), factor=term.factor * signs) for term in turned),
            ]
        return None

    def _complex_table(self, table: Value) -> tuple[int, Tensor]:
        """Returns the number of a complex table, and the places of its real and imaginary parts."""
        source, places = self.moved(table)
        if id(source) not in self._as_real:
            self._as_real[id(source)] = Value(
                "view_as_real", torch.ops.aten.view_as_real.default, (source,), {}, 0,
                (*source.shape, 2), torch.float32, source.roles,
            )  # fmt: skip
        number = self.number(self._as_real[id(source)]) + 1
        self.rounds[number] = False
        return number, torch.stack((2 * places, 2 * places + 1), -1)

    def _multiplied(self, value: Value, is_origin: Callable[[Value], bool]) -> list[Term]:
        first, second = value.args[:2]
        constant = constant_of(second)
        if constant is None and value.op == "mul":
            constant = constant_of(first)
            if constant is not None:
                first, second = second, first
        if constant is not None:
            by = constant if value.op == "mul" else 1.0 / constant
            return [_scaled(t, by) for t in self.terms(first, is_origin)]
        if value.op == "mul" and isinstance(second, Value) and isinstance(first, Value):
            if is_table(first):
                first, second = second, first
            if is_table(second) and not is_table(first):
                return self._turned(value, self.terms(first, is_origin), second)
        return [self._origin(value)]

    def _turned(self, value: Value, terms: list[Term], table: Value) -> list[Term]:
        source, places = self.moved(table)
        shape, number = self.shape(value), self.number(source) + 1
        places = places.expand(shape)
        found = []
        for term in terms:
            own = term.mapped(lambda x: x.expand(shape))
            free = own.tables == 0
            if not bool(free[..., 1].all()):
                raise NotRepresentedError("an element is multiplied by more than two tables")
            slot = (~free[..., 0]).long().unsqueeze(-1)
            tables = own.tables.clone().scatter_(-1, slot, number)
            columns = own.columns.clone().scatter_(-1, slot, places.unsqueeze(-1))
            found.append(Term(own.factor, own.origin, own.place, tables, columns))
        self.rounds[number] = value.dtype != torch.float32
        return found

    # -- equal elements of tables ------------------------------------------------------------------------

    def identities(self, value: Value) -> Tensor:
        """Returns a number for each element of a function of the positions; equal ones are computed alike."""
        if id(value) in self._identities:
            return self._identities[id(value)]
        if value.op in MOVES:
            found = self._move(value, self.identities(value.args[0]))
        elif value.op in ("cat", "stack"):
            dim = value.args[1] if len(value.args) > 1 else value.kwargs.get("dim", 0)
            join = torch.cat if value.op == "cat" else torch.stack
            found = join([self.identities(each) for each in value.args[0]], dim)
        elif value.op in _ELEMENTWISE:
            shape = self.shape(value)
            operands = [
                self.identities(a).expand(shape)
                if isinstance(a, Value)
                else torch.full(shape, self._id(("n", a)))
                for a in value.args
            ]
            key = value.op, value.dtype, tuple(sorted(value.kwargs.items(), key=str)).__repr__()
            rows = torch.stack([each.reshape(-1) for each in operands], -1)
            unique, inverse = torch.unique(rows, dim=0, return_inverse=True)
            ids = torch.tensor([self._id((key, *row)) for row in unique.tolist()])
            found = ids[inverse].reshape(shape)
        else:
            shape = self.shape(value)
            count = reduce(mul, shape, 1)
            found = torch.tensor([self._id((id(value), i)) for i in range(count)]).reshape(shape)
        self._identities[id(value)] = found
        return found

    def _id(self, key: Any) -> int:
        return self._known.setdefault(key, len(self._known))

    # -- where an element is ---------------------------------------------------------------------------

    def located(self, value: Value, places: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Splits places in a value into sequence, token and the rest; ``None``: the value has one for all."""
        batch: Tensor | None = None
        token: Tensor | None = None
        rest = torch.zeros_like(places)
        left, stride = places, reduce(mul, self.shape(value), 1)
        for expression, size in zip(value.shape, self.shape(value), strict=True):
            stride //= size
            index, left = left // stride, left % stride
            if expression == self.program.batch:
                batch = index
            elif self.program.length != 1 and expression == self.program.length:
                token = index
            elif self.program.length != 1 and expression == self.program.batch * self.program.length:
                batch, token = index // LENGTH, index % LENGTH
            elif hasattr(expression, "free_symbols") and expression.free_symbols:
                raise NotRepresentedError("a size is computed from the number of tokens")
            else:
                rest = rest * size + index
        return batch, token, rest


_ELEMENTWISE = {
    "mul", "add", "sub", "div", "neg", "cos", "sin", "_to_copy", "pow", "exp", "log", "log1p", "floor",
    "sqrt", "rsqrt", "reciprocal", "clamp", "minimum", "maximum", "where", "rsub",
}  # fmt: skip


def is_table(value: Value) -> bool:
    """Whether a value is a function of the positions alone."""
    return value.roles == Role.POSITIONS and value.dtype.is_floating_point


def constant_of(given: Any) -> float | None:
    """Returns the number that an argument is, if it is one: a Python number or a constant of one element."""
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return float(given)
    if not isinstance(given, Value):
        return None
    if given.op == "constant" and given.tensor is not None and given.tensor.numel() == 1 and given.roles == 0:
        return float(given.tensor)
    if given.op == "_to_copy" and given.dtype.is_floating_point:
        inner = constant_of(given.args[0])
        return None if inner is None else float(torch.tensor(inner, dtype=torch.float64).to(given.dtype))
    if given.op in MOVES:
        return constant_of(given.args[0])
    return None


def _is_plain_sum(value: Value) -> bool:
    return (
        all(isinstance(each, Value) for each in value.args[:2])
        and value.kwargs.get("alpha", 1) == 1
        and len(value.args) == 2
    )


def _by_table(term: Term, number: int, places: Tensor) -> Term:
    """Returns a term without tables, multiplied by elements of one."""
    tables, columns = torch.zeros_like(term.tables), torch.zeros_like(term.columns)
    tables[..., 0], columns[..., 0] = number, places
    return replace(term, tables=tables, columns=columns)


def _scaled(term: Term, by: float) -> Term:
    return Term(term.factor * by, term.origin, term.place, term.tables, term.columns)
