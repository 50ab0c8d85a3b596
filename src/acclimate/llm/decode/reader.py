"""Reads the values of a captured program: which products, normalizations and rotations they are.

``match.py`` describes a decoder with it, ``experts.py`` its experts, and ``latent.py`` keys and values that
are made of latents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.llm.decode.description import (
    Mlp,
    Norm,
    NotRepresentedError,
    Part,
    Product,
    Rotary,
    RotaryTable,
)
from acclimate.llm.decode.elements import Elements, Term, constant_of
from acclimate.llm.decode.operators import activation_of, is_mean, orders, widened
from acclimate.llm.decode.program import Program, Value
from acclimate.llm.decode.tables import PositionColumns, check_by_position


@dataclass(frozen=True, eq=False)
class Normed:
    """A normalization in a program."""

    norm: Norm
    given: Value


class ProgramReader:
    """Reads the values of one program."""

    def __init__(self, model: Any, program: Program) -> None:
        self.model, self.program = model, program
        self.elements = Elements(program)
        self.dtype: torch.dtype = model.dtype
        self.tables: list[RotaryTable] = []
        self._norms: dict[int, Normed | None] = {}

    # -- linear modules ------------------------------------------------------------------------------

    def columns(self, value: Value) -> tuple[Product, Value] | None:
        """Returns the columns of linear modules that a value consists of, and these modules' input."""
        return self.product(self.elements.columns(value, lambda v: v.op == "linear"))

    def product(self, found: tuple[Tensor, Tensor] | None) -> tuple[Product, Value] | None:
        """Returns the product whose columns were found, and its input, if they are linear modules'."""
        if found is None:
            return None
        origin, columns = found
        values = {number: self.elements.origins[number] for number in origin.unique().tolist()}
        first = values[int(origin[0])]
        if any(v.op != "linear" for v in values.values()):
            return None
        if any(v.args[0] is not first.args[0] for v in values.values()):
            return None
        # A part begins where the module changes, or the column is not the next one.
        follows = (origin[1:] == origin[:-1]) & (columns[1:] == columns[:-1] + 1)
        begins = [0, *((~follows).nonzero().flatten() + 1).tolist()]
        parts = [
            Part(self.program.modules[values[int(origin[at])].args[1]], int(columns[at]), end - at)
            for at, end in zip(begins, [*begins[1:], len(origin)], strict=True)
        ]
        return Product(tuple(parts)), first.args[0]

    def output_of(self, value: Value) -> tuple[nn.Module, Value] | None:
        """Returns the linear module that a value is the output of, and its input."""
        return (self.program.modules[value.args[1]], value.args[0]) if value.op == "linear" else None

    def dense_mlp(self, value: Value) -> tuple[Mlp, Value] | None:
        """Returns the MLP that a value is the result of, and the input of its first products."""
        output = self.output_of(value)
        if output is None or self.attention_of(output[1]) is not None:
            return None
        down, inner = output
        alone = activation_of(inner)
        if alone is not None:
            up = self.columns(alone[1])
            return None if up is None else (Mlp(None, up[0], alone[0], down), up[1])
        if inner.op != "mul" or not all(isinstance(argument, Value) for argument in inner.args[:2]):
            return None
        for first, second in orders(inner):
            active = activation_of(first)
            gate, up = None if active is None else self.columns(active[1]), self.columns(second)
            if active is not None and gate is not None and up is not None and gate[1] is up[1]:
                return Mlp(gate[0], up[0], active[0], down), up[1]
        return None

    def attention_of(self, value: Value) -> Value | None:
        """Returns the attention whose result, head after head, is a value."""
        source, places = self.elements.moved(value)
        if source.op != "attention":
            return None
        expected = torch.arange(places.numel()).reshape(places.shape)
        return source if torch.equal(places, expected) else None

    def cached(self, value: Value, is_key: bool) -> int:
        """Returns the layer in whose cache a value is."""
        if value.op != "past" or value.args[3] is not is_key or value.args[1] != self.program.past:
            raise NotRepresentedError("keys or values are changed after they are stored")
        return int(value.args[2])

    # -- normalizations --------------------------------------------------------------------------------

    def norm(self, value: Value) -> Normed | None:
        """Returns the normalization of the last dimension that a value is, if it is one."""
        if id(value) not in self._norms:
            self._norms[id(value)] = self._find_norm(value)
        return self._norms[id(value)]

    def _find_norm(self, value: Value) -> Normed | None:
        outer = widened(value)
        if outer.op in ("native_layer_norm", "_fused_rms_norm") and outer.output == 0:
            return self._fused(outer)
        bias: Tensor | None = None
        core = outer
        if core.op == "add" and isinstance(core.args[1], Value):
            for operand, other in orders(core):
                if isinstance(other, Value) and self._is_weight(other):
                    core, bias = operand, self.constant(widened(other))
                    break
        weight: Tensor | None = None
        adds_one = False
        if core.op == "mul" and isinstance(core.args[1], Value):
            for operand, other in orders(core):
                found = self._weight(other)
                if found is not None:
                    core, (weight, adds_one) = operand, found
                    break
        inner = widened(core)
        plain = self._plain_norm(inner)
        if plain is None:
            return None
        kind, eps, given = plain
        rounds = inner is not core and weight is not None and core.dtype != torch.float32
        if weight is not None and weight.shape[-1] != given.shape[-1]:
            return None
        return Normed(Norm(kind, weight, bias, eps, adds_one, rounds), given)  # type: ignore[arg-type]

    def _fused(self, value: Value) -> Normed | None:
        given, shape, weight = value.args[:3]
        if value.op == "native_layer_norm":
            kind, bias, eps = "layer", value.args[3], value.args[4]
        else:
            kind, bias, eps = "rms", None, value.args[3]
            eps = torch.finfo(given.dtype).eps if eps is None else eps
        if len(shape) != 1:
            return None
        factors = (None, False) if weight is None else self._weight(weight)
        if factors is None:
            raise NotRepresentedError("a normalization's weight is computed in an unknown way")
        bias = None if bias is None else self.constant(widened(bias))
        return Normed(Norm(kind, factors[0], bias, eps, factors[1], False), widened(given))  # type: ignore

    def _is_weight(self, value: Value) -> bool:
        inner = widened(value)
        return inner.op == "constant" and inner.tensor is not None and inner.tensor.numel() > 1

    def _weight(self, value: Any) -> tuple[Tensor, bool] | None:
        if not isinstance(value, Value):
            return None
        inner = widened(value)
        if inner.op == "add":
            for operand, other in orders(inner):
                if constant_of(other) == 1.0 and self._is_weight(operand):
                    return self.constant(widened(operand)), True
            return None
        return (self.constant(inner), False) if self._is_weight(inner) else None

    def _plain_norm(self, value: Value) -> tuple[str, float, Value] | None:
        """Reads x · rsqrt(mean(x²) + eps), where x may have its mean subtracted first."""
        if value.op == "div" and isinstance(value.args[1], Value) and value.args[1].op == "sqrt":
            x, inverse = value.args[0], value.args[1]
        elif value.op == "mul" and isinstance(value.args[1], Value):
            pairs = [
                (x, r) for x, r in orders(value) if r.op == "rsqrt" or (r.op == "pow" and r.args[1] == -0.5)
            ]
            if not pairs:
                return None
            x, inverse = pairs[0]
        else:
            return None
        total = inverse.args[0]
        if total.op != "add":
            return None
        for square, small in orders(total):
            eps = constant_of(small)
            if eps is not None and isinstance(square, Value) and self._is_mean_square(square, x):
                if x.op == "sub" and is_mean(x.args[1], x.args[0]):
                    return "layer", eps, widened(x.args[0])
                return "rms", eps, widened(x)
        return None

    def _is_mean_square(self, value: Value, x: Value) -> bool:
        if value.op != "mean":
            return False
        square = value.args[0]
        is_square = (square.op == "pow" and square.args[0] is x and square.args[1] == 2) or (
            square.op == "mul" and square.args[0] is x and square.args[1] is x
        )
        return is_square and is_mean(value, square)

    def constant(self, value: Value) -> Tensor:
        """Returns the model's own tensor that a value is."""
        if value.op != "constant" or value.tensor is None:
            raise NotRepresentedError(f"a weight is computed with {value.op}")
        return value.tensor

    # -- rotations -----------------------------------------------------------------------------------

    def unrotated(
        self, terms: list[Term]
    ) -> tuple[Tensor, Tensor, Rotary | None, float, PositionColumns | None]:
        """Returns origin and place of the elements before a rotation, the rotation, a common factor, and what
        each token's elements are multiplied by after the rotation."""
        cells = torch.stack([t.cells for t in terms])
        factors = cells[:, 0]
        used = factors != 0
        if not bool((cells[:, 3] > 0).any()):
            if len(terms) != 1 or not bool((factors == factors.flatten()[0]).all()):
                raise NotRepresentedError("heads are sums of several elements")
            origin, place = cells[0, 1:3].long()
            return origin, place, None, float(factors.flatten()[0]), None
        scale = float(factors.abs().amax())
        if not bool((used.sum(0) <= 2).all()) or not bool((factors[used].abs() == scale).all()):
            raise NotRepresentedError("heads are rotated in an unknown way")
        # The two summands of each element, in two slots.
        order = used.int().argsort(dim=0, descending=True, stable=True)[:2]
        if len(order) < 2:
            raise NotRepresentedError("heads are multiplied by a function of the position")
        chosen = cells.gather(0, order.unsqueeze(1).expand(2, *cells.shape[1:]))
        factor = chosen[:, 0] / scale
        # Each: origin or table, place there; slots; elements.
        element, angle, other_angle = (chosen[:, i : i + 2].long().transpose(0, 1) for i in (1, 3, 5))
        is_turned = (factor[1] != 0)[0, 0, 0]
        width = int(is_turned.sum())
        turned = torch.arange(len(is_turned)) < width
        if not torch.equal(factor[1] != 0, turned.expand_as(factor[1])):
            raise NotRepresentedError("the rotated elements of a head do not come first")
        if bool((angle[0, 0][..., ~turned] > 0).any()) or bool((angle[0][..., turned] == 0).any()):
            raise NotRepresentedError("heads are multiplied by a function of the position")
        common = self.common(other_angle) if bool((other_angle[0] > 0).any()) else None
        if bool((factor[0][..., ~turned] != 1).any()):
            raise NotRepresentedError("the elements that are not rotated are negated")
        for interleaved in (False, True):
            found = self._turn(factor, element, angle, width, interleaved)
            if found is not None:
                return (*found, scale, common)
        raise NotRepresentedError("heads are rotated in an unknown way")

    def common(self, angle: Tensor) -> PositionColumns:
        """Returns the function whose number for a token multiplies both summands of all its elements."""
        found = self._columns_of(angle[:, 0], angle[:, 1])
        if len(set(found.columns)) != 1:
            raise NotRepresentedError("the elements of a head are multiplied by different functions")
        return replace(found, columns=found.columns[:1])

    def _turn(
        self, factor: Tensor, element: Tensor, angle: Tensor, width: int, interleaved: bool
    ) -> tuple[Tensor, Tensor, Rotary] | None:
        """Reads a rotation of pairs: (a, b) becomes (a cos - b sin, b cos + a sin), or the same with -sin."""
        if width % 2:
            return None
        places = torch.arange(width)
        first, second = (places[::2], places[1::2]) if interleaved else places.chunk(2)
        is_reversed = not bool((factor[..., first] < 0).any())
        if is_reversed:  # to turn (a, b) by a negative angle is to turn (b, a)
            first, second = second, first
        # Of a pair's first element, the negative summand is the sine's.
        negative = factor[..., first] < 0
        if not bool((negative.sum(0) == 1).all()) or bool((factor[..., second] < 0).any()):
            return None
        sine = negative.int().argmax(0)
        a, b = _at(element[..., first], 1 - sine), _at(element[..., first], sine)
        cosine = (element[..., second] == b.unsqueeze(1)).all(0)
        if not bool((cosine.sum(0) == 1).all()):
            return None
        which = cosine.int().argmax(0)
        if not torch.equal(_at(element[..., second], 1 - which), a):
            return None
        cos = _at(angle[..., first], 1 - sine), _at(angle[..., second], which)
        sin = _at(angle[..., first], sine), _at(angle[..., second], 1 - which)
        sines = replace(self._columns_of(*sin), factor=-1.0 if is_reversed else 1.0)
        table = RotaryTable(self._columns_of(*cos), sines, width)
        rounds = any(self.elements.rounds[n] for n in angle[0][..., :width].unique().tolist())
        if table not in self.tables:
            self.tables.append(table)
        found = element[:, 0].clone()
        found[..., first], found[..., second] = a, b
        origin, place = found
        return origin, place, Rotary(self.tables.index(table), width, interleaved, rounds)

    def _columns_of(self, first: Tensor, second: Tensor) -> PositionColumns:
        """Returns the function that gives one number for each pair; both elements must use the same."""
        numbers = torch.cat((first[0], second[0])).unique().tolist()
        if len(numbers) != 1:
            raise NotRepresentedError("heads are rotated by several tables")
        value = self.elements.origins[int(numbers[0]) - 1]
        places = first[1]
        same = self.elements.identities(value).reshape(-1)
        if not torch.equal(same[places], same[second[1]]):
            raise NotRepresentedError("the two elements of a pair are rotated by different angles")
        rest = self.elements.within_token(value, places)
        if rest is None:
            raise NotRepresentedError("an element is rotated by another token's angle")
        if not torch.equal(rest, rest[:1, :1, :1].expand_as(rest)):
            raise NotRepresentedError("heads are rotated by different angles")
        check_by_position(value, self.program)
        if self.program.length == 1 and self.program.batch not in value.shape:
            raise NotRepresentedError("an angle is not computed for each sequence")
        program, columns = self.program, tuple(rest[0, 0, 0].tolist())
        return PositionColumns(program.batch, program.length, program.past, value, columns)


def _at(slots: Tensor, index: Tensor) -> Tensor:
    """Picks one of two slots for every element: 2 x slots x elements becomes 2 x elements."""
    return slots.gather(1, index.expand(2, 1, *index.shape)).squeeze(1)
