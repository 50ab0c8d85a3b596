"""Follows the elements of tensors through operators that only move, negate, add and rotate them.

Such an operator does the same whatever the values are, so applying it to the elements' places once, for small
sizes, says exactly which element of which earlier tensor every element is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
ELEMENTWISE = {
    "mul", "add", "sub", "div", "neg", "cos", "sin", "_to_copy", "pow", "exp", "log", "log1p", "floor",
    "sqrt", "rsqrt", "reciprocal", "clamp", "minimum", "maximum", "where", "rsub",
}  # fmt: skip
"""Operators whose results' elements are each computed of the operands' elements in the same place."""
_SCATTERED = {"slice_scatter", "select_scatter"}
"""Operators that put elements in the place of a part of a tensor's."""
BATCH, LENGTH = 2, 3
"""The sizes with which programs are followed."""


@dataclass(frozen=True)
class Term:
    """One summand of every element of a tensor: a number times an element of an earlier one, and of up to two
    tables."""

    cells: Tensor
    """7 x the tensor's shape: the number, the index of the earlier tensor in ``Elements.origins``, the place
    in that, a table and the place in it, and a second table and place. Tables count from one; zero: none."""

    @property
    def factor(self) -> Tensor:
        """The numbers."""
        return self.cells[0]

    @property
    def is_plain(self) -> bool:
        """Whether it is nothing but elements of earlier tensors."""
        return not bool((self.cells[3] > 0).any()) and bool((self.factor == 1.0).all())

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Term:
        """Returns the term with an operator applied to every cell."""
        return Term(torch.stack([change(cell) for cell in self.cells]))

    def times(self, by: float) -> Term:
        """Returns the term with other numbers."""
        return Term(torch.cat((self.cells[:1] * by, self.cells[1:])))


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
            return [self.size(part) for part in expression]
        if hasattr(expression, "free_symbols"):
            if expression not in self._known_sizes:
                self._known_sizes[expression] = int(expression.subs(self._sizes))
            return self._known_sizes[expression]
        return expression

    def shape(self, value: Value) -> list[int]:
        """Returns a value's shape with numbers in place of symbolic sizes."""
        return [self.size(size) for size in value.shape]

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
            *(self.size(argument) for argument in value.args[1:]),
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
        if value.op in _SCATTERED:
            return self._scattered(value, is_origin)
        if value.op == "view_as_real" and (turned := self._turned_as_complex(value, is_origin)) is not None:
            return turned
        if value.op == "neg":
            return [t.times(-1.0) for t in self.terms(value.args[0], is_origin)]
        if value.op in ("add", "sub") and _is_plain_sum(value):
            first, second = (self.terms(argument, is_origin) for argument in value.args[:2])
            sign = 1.0 if value.op == "add" else -1.0
            shape = self.shape(value)
            return [t.mapped(lambda x: x.expand(shape)) for t in (*first, *(t.times(sign) for t in second))]
        if value.op in ("mul", "div"):
            return self._multiplied(value, is_origin)
        return [self._origin(value)]

    def _origin(self, value: Value) -> Term:
        shape = self.shape(value)
        cells = torch.zeros((7, *shape), dtype=torch.float64)
        cells[0], cells[1] = 1.0, self.number(value)
        cells[2] = torch.arange(cells[0].numel()).reshape(shape)
        return Term(cells)

    def _joined(self, value: Value, is_origin: Callable[[Value], bool]) -> list[Term]:
        parts = _as_many([self.terms(part, is_origin) for part in value.args[0]])
        dim = value.args[1] if len(value.args) > 1 else value.kwargs.get("dim", 0)
        dim = dim % len(value.shape) + 1  # after the dimension of the cells
        join = torch.cat if value.op == "cat" else torch.stack
        return [Term(join([term.cells for term in terms], dim)) for terms in zip(*parts, strict=True)]

    def _scattered(self, value: Value, is_origin: Callable[[Value], bool]) -> list[Term]:
        """Follows a tensor of which some elements are another's."""
        whole, some = _as_many([self.terms(operand, is_origin) for operand in value.args[:2]])
        where = slice(None), *self._place_of(value)  # the cells' dimension comes first
        found = [term.cells.clone() for term in whole]
        for cells, term in zip(found, some, strict=True):
            cells[where] = term.cells
        return [Term(cells) for cells in found]

    def _place_of(self, value: Value) -> tuple[Any, ...]:
        """Returns which elements of a tensor are another's."""
        given = [self.size(argument) for argument in value.args[2:]]
        dim, *where = given or [0]
        place = where[0] if value.op == "select_scatter" else slice(*where) if where else slice(None)
        return (*[slice(None)] * (dim % len(value.shape)), place)

    def _turned_as_complex(self, value: Value, is_origin: Callable[[Value], bool]) -> list[Term] | None:
        """Follows pairs of elements that are multiplied by a complex table, as complex numbers."""
        product = value.args[0]
        if product.op != "mul" or not all(isinstance(operand, Value) for operand in product.args[:2]):
            return None
        for pairs, table in (product.args[:2], product.args[1::-1]):
            if pairs.op != "view_as_complex" or pairs.shape != product.shape:
                continue
            if table.roles != Role.POSITIONS or not table.dtype.is_complex:
                continue
            number, places = self._complex_table(table)
            shape, terms = self.shape(value), self.terms(pairs.args[0], is_origin)
            if any(bool((term.cells[3] > 0).any()) for term in terms):
                raise NotRepresentedError("an element is rotated twice")
            # (a + ib)(c + is) is (ac - bs) + i(bc + as).
            turned = [t.mapped(lambda x: x.flip(-1)).cells for t in terms]
            for cells in turned:
                cells[0] *= torch.tensor([-1.0, 1.0], dtype=torch.float64)
            parts = *((term.cells, 0) for term in terms), *((cells, 1) for cells in turned)
            found = []
            for cells, part in parts:
                angle = torch.stack((torch.full(shape, number), places[..., part, None].expand(shape)))
                found.append(Term(torch.cat((cells[:3], angle.double(), torch.zeros_like(angle).double()))))
            return found
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
            return [t.times(by) for t in self.terms(first, is_origin)]
        if value.op == "mul" and isinstance(second, Value) and isinstance(first, Value):
            if is_table(first):
                first, second = second, first
            if is_table(second) and not is_table(first):
                return self._turned(value, self.terms(first, is_origin), second)
        return [self._origin(value)]

    def _turned(self, value: Value, terms: list[Term], table: Value) -> list[Term]:
        source, places = self.moved(table)
        shape, number = self.shape(value), self.number(source) + 1
        angle = torch.stack((torch.full(shape, number), places.expand(shape))).double()
        found = []
        for term in terms:
            cells = term.mapped(lambda x: x.expand(shape)).cells
            if bool((cells[5] > 0).any()):
                raise NotRepresentedError("an element is multiplied by more than two tables")
            first, second = cells[3:5], cells[5:]
            added = torch.where(first[0] == 0, angle, first), torch.where(first[0] == 0, second, angle)
            found.append(Term(torch.cat((cells[:3], *added))))
        self.rounds[number] = value.dtype != torch.float32
        return found

    def columns(self, value: Value, is_origin: Callable[[Value], bool]) -> tuple[Tensor, Tensor] | None:
        """Returns the origin of each column of a value, and the column there; ``None``: it has others."""
        terms = self.terms(value, is_origin)
        if len(terms) != 1 or not terms[0].is_plain:
            return None
        origin, place = terms[0].cells[1:3].long()
        return self.columns_at(origin, place, self.size(value.shape[-1]))

    def columns_at(self, origin: Tensor, place: Tensor, width: int) -> tuple[Tensor, Tensor] | None:
        """Returns the same for elements, ``width`` of each token; the origins must have the same tokens."""
        origin, place = origin.reshape(-1, width), place.reshape(-1, width)
        numbers, which = origin[0].unique(return_inverse=True)
        widths = torch.tensor([self.size(self.origins[n].shape[-1]) for n in numbers.tolist()])[which]
        is_same = torch.equal(origin, origin[:1].expand_as(origin))
        in_order = torch.equal(place, place[:1] + torch.arange(len(place))[:, None] * widths)
        return (origin[0], place[0]) if is_same and in_order and bool((place[0] < widths).all()) else None

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
            found = join([self.identities(argument) for argument in value.args[0]], dim)
        elif value.op in _SCATTERED:
            found = self.identities(value.args[0]).clone()
            found[self._place_of(value)] = self.identities(value.args[1])
        elif value.op in ELEMENTWISE:
            shape = self.shape(value)
            operands = [
                self.identities(a).expand(shape)
                if isinstance(a, Value)
                else torch.full(shape, self._id(("n", a)))
                for a in value.args
            ]
            key = value.op, value.dtype, tuple(sorted(value.kwargs.items(), key=str)).__repr__()
            rows = torch.stack([operand.reshape(-1) for operand in operands], -1)
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

    def within_token(self, value: Value, places: Tensor) -> Tensor | None:
        """Returns the places of elements within their sequence and token of a value.

        Args:
            value: the value; where it has no sequences or tokens, all have the same.
            places: the elements' places in the value, sequences x anything x tokens x anything.

        Returns:
            ``None`` if an element is of another sequence or token than its own.
        """
        own = torch.arange(places.shape[0])[:, None, None, None], torch.arange(places.shape[2])[:, None]
        tokens: list[Tensor | None] = [None, None]
        rest = torch.zeros_like(places)
        left, stride = places, reduce(mul, self.shape(value), 1)
        for expression, size in zip(value.shape, self.shape(value), strict=True):
            stride //= size
            index, left = left // stride, left % stride
            if expression == self.program.batch:
                tokens[0] = index
            elif self.program.length != 1 and expression == self.program.length:
                tokens[1] = index
            elif self.program.length != 1 and expression == self.program.batch * self.program.length:
                tokens = [index // LENGTH, index % LENGTH]
            elif hasattr(expression, "free_symbols") and expression.free_symbols:
                raise NotRepresentedError("a size is computed from the number of tokens")
            else:
                rest = rest * size + index
        is_own = all(f is None or torch.equal(f, o.expand_as(f)) for f, o in zip(tokens, own, strict=True))
        return rest if is_own else None


def _as_many(parts: list[list[Term]]) -> list[list[Term]]:
    """Returns lists of terms with empty summands, so that all have the same length."""
    most = max(len(part) for part in parts)
    return [[*part, *[part[0].times(0.0)] * (most - len(part))] for part in parts]


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
    return all(isinstance(argument, Value) for argument in value.args)
