"""Matches a gated delta rule, whose state and whose last inputs of a convolution are in the cache.

Like ``match.py``, it reads a step's operators backwards: from the output projection's input to the result of
the state, from the state to what changes it, and from that to the convolution and the linear modules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.llm.decode.convolution import ConvolutionReader, Convolved
from acclimate.llm.decode.description import DeltaRule, Norm, NotRepresentedError, Product
from acclimate.llm.decode.elements import constant_of
from acclimate.llm.decode.operators import activation_of, orders, widened
from acclimate.llm.decode.program import Value
from acclimate.llm.decode.reader import ProgramReader


@dataclass(frozen=True)
class FoundDeltaRule:
    """A delta rule in a program."""

    rule: DeltaRule
    source: Value
    """The input of the linear modules."""
    layer: int
    """The layer in whose cache the state is."""


def find_delta_rule(reader: ProgramReader, output: nn.Module, value: Value) -> FoundDeltaRule | None:
    """Returns the delta rule whose results a linear module ``output`` takes; ``None``: there is none.

    Raises:
        NotRepresentedError: there is one, in a form that a description cannot express.
    """
    if not reader.program.recurrent or value.dtype != reader.dtype:
        return None
    gated, places = reader.elements.moved(value)
    product = widened(gated)
    if product.op != "mul" or product.dtype != torch.float32 or not _are_values(product.args[:2]):
        return None
    for normalized, gate in orders(product):
        normed = reader.norm(normalized)
        if normed is None or normed.norm.kind != "rms":
            continue
        result = _ResultReader(reader).result(normed.given)
        if result is None:
            continue
        if normalized.dtype != reader.dtype or normed.given.dtype != reader.dtype:
            raise NotRepresentedError("the results of a delta rule are not rounded to the model's dtype")
        if not torch.equal(places.flatten(), torch.arange(places.numel())):
            raise NotRepresentedError("the results of a delta rule are moved")
        return _DeltaRuleReader(reader, result).read(normed.norm, gate, output)
    return None


def _are_values(operands: tuple[Any, ...]) -> bool:
    return all(isinstance(operand, Value) for operand in operands)


def _is_sum(value: Any, axis: int, *, keeps: bool) -> bool:
    """Whether a value is a sum over one dimension, which stays as one element or goes."""
    if not isinstance(value, Value) or value.op != "sum" or len(value.args) < 2 or value.kwargs:
        return False
    dims = value.args[1]
    rank = len(value.args[0].shape)
    kept = value.args[2] if len(value.args) > 2 else False
    return len(dims) == 1 and dims[0] % rank == axis % rank and kept is keeps


def _factors(value: Value) -> list[tuple[Value, Value]]:
    """Returns the two operands of a product, in both orders; none if it is none."""
    return list(orders(value)) if value.op == "mul" and _are_values(value.args[:2]) else []


class _Follower:
    """Follows the elements of values that are computed of one other value, each of one of its elements."""

    def __init__(self, reader: ProgramReader) -> None:
        self._reader, self._elements = reader, reader.elements

    def origin(self, value: Value) -> tuple[Value, Tensor, float] | None:
        """Returns the value whose elements a value has, moved, converted or multiplied by a number; their
        places there, and that number."""
        terms = self._elements.terms(value, lambda v: v.op in ("sum", "linear", "state"))
        if len(terms) != 1 or bool((terms[0].cells[3] > 0).any()):
            return None
        factor, origin, place = terms[0].cells[:3]
        first = int(origin.flatten()[0])
        if not bool((origin == first).all()) or not bool((factor == factor.flatten()[0]).all()):
            return None
        return self._elements.origins[first], place.long(), float(factor.flatten()[0])

    def in_order(self, value: Value, what: str) -> tuple[Value, float]:
        """Returns the origin of a value that has all its elements in order, and the number that multiplies
        them."""
        found = self.origin(value)
        if found is None or not torch.equal(found[1].flatten(), torch.arange(self._count(found[0]))):
            raise NotRepresentedError(f"the {what} of a delta rule come from an unknown place")
        return found[0], found[2]

    def _count(self, value: Value) -> int:
        return torch.Size(self._elements.shape(value)).numel()


class _ResultReader(_Follower):
    def result(self, value: Value) -> Value | None:
        """Returns the sum over the keys of a state that a normalization's input is; ``None``: it is none."""
        found = self.origin(value)
        if found is None or not _is_sum(found[0], -2, keeps=False) or found[2] != 1.0:
            return None
        if not torch.equal(found[1].flatten(), torch.arange(found[1].numel())):
            return None
        is_of_state = any(
            state is made
            for made in self._reader.program.recurrent.values()
            for state, _ in _factors(found[0].args[0])
        )
        return found[0] if is_of_state else None


class _DeltaRuleReader(_Follower):
    """Reads a delta rule of a step, given the sum over the keys of its new state."""

    def __init__(self, reader: ProgramReader, result: Value) -> None:
        super().__init__(reader)
        self._result = result
        recurrent = reader.program.recurrent
        self._layer, self._made, self._query = next(
            (layer, made, query)
            for layer, made in recurrent.items()
            for state, query in _factors(result.args[0])
            if state is made
        )
        _, *self._sizes = self._elements.shape(self._made)
        if reader.program.length != 1 or self._made.dtype != torch.float32 or len(self._sizes) != 3:
            raise NotRepresentedError("a recurrent state is not in float32, or of other sizes")

    def read(self, norm: Norm, gate: Value, output: nn.Module) -> FoundDeltaRule:
        """Returns the delta rule, given what follows its result."""
        heads, key_size, value_size = self._sizes
        decay, key, value, strength = self._parts()
        unit_query, scale = self._unit(self._query, "queries")
        unit_key, factor = self._unit(key, "keys")
        if factor != 1.0 or unit_query[1] != unit_key[1]:
            raise NotRepresentedError("the queries and keys of a delta rule are normalized otherwise")
        active, key_heads = self._active(unit_query[0], unit_key[0], value)
        activation = activation_of(active)
        if activation is None or active.dtype != self._reader.dtype:
            raise NotRepresentedError(f"queries, keys and values are made with {active.op}")
        convolved = self._convolved(activation[1])
        gate_activation = activation_of(gate)
        if gate_activation is None or gate.dtype != torch.float32:
            raise NotRepresentedError(f"the gate of a delta rule is made with {gate.op}")
        rate, bias, decays = self._decay(decay)
        sigmoid, strength_factor = self._strength(strength)
        given, source = self._columns(convolved.new, "channels")
        products = [
            self._columns(sigmoid.args[0], "strengths"),
            self._columns(decays, "decays"),
            self._columns(gate_activation[1], "gates"),
        ]
        if any(product[1] is not source for product in products):
            raise NotRepresentedError("the parts of a delta rule have different inputs")
        widths = [product[0].width for product in products]
        if widths != [heads, heads, heads * value_size]:
            raise NotRepresentedError("the parts of a delta rule have other sizes")
        if convolved.layer != self._layer:
            raise NotRepresentedError("a delta rule's state and its convolution are in different layers")
        rule = DeltaRule(
            given, convolved.weight, convolved.bias, activation[0], heads, key_heads, key_size, value_size,
            unit_key[1], scale, products[0][0], strength_factor, products[1][0], bias, rate, norm,
            products[2][0], gate_activation[0], output,
        )  # fmt: skip
        return FoundDeltaRule(rule, source, self._layer)

    def _parts(self) -> tuple[Value, Value, Value, Value]:
        """Returns the decay, the keys, the values and the strengths, of the operators that change the state.

        decayed = held * decay; decayed + key * ((value - sum(decayed * key)) * strength)
        """
        unknown = NotRepresentedError("a recurrent state is changed in an unknown way")
        if self._made.op != "add" or not _are_values(self._made.args[:2]):
            raise unknown
        for decayed, added in orders(self._made):
            for held, decay in _factors(decayed):
                if held.op != "state" or held.args[2] != self._layer:
                    continue
                for key, change in _factors(added):
                    found = self._change(key, change, decayed)
                    if found is not None:
                        self._check_places(decay, (0, 1))
                        self._check_places(key, (0, 1, 2))
                        self._check_places(self._query, (0, 1, 2))
                        self._check_places(change, (0, 1, 3))
                        return decay, key, *found
        raise unknown

    def _change(self, key: Value, change: Value, decayed: Value) -> tuple[Value, Value] | None:
        """Returns the values and strengths, if a change of the state is that of the delta rule."""
        found = self.origin(change)
        if found is None or found[2] != 1.0:
            return None
        for gap, strength in _factors(found[0]):
            if gap.op != "sub" or not _are_values(gap.args[:2]) or not _is_sum(gap.args[1], -2, keeps=False):
                continue
            if any(state is decayed and other is key for state, other in _factors(gap.args[1].args[0])):
                is_whole = torch.equal(found[1].flatten(), torch.arange(self._count(found[0])))
                has_sizes = found[0].shape[1:] == (self._sizes[0], self._sizes[2])
                if is_whole and has_sizes and gap.shape == found[0].shape:
                    return gap.args[0], strength
        return None

    def _check_places(self, value: Value, axes: tuple[int, ...]) -> None:
        """Raises unless a value has the state's sizes in some dimensions, and one element in the others."""
        whole = self._elements.shape(self._made)
        if self._elements.shape(value) != [size if axis in axes else 1 for axis, size in enumerate(whole)]:
            raise NotRepresentedError("a recurrent state is changed by values of other sizes")

    def _unit(self, value: Value, what: str) -> tuple[tuple[Value, float], float]:
        """Returns what is divided by its length, what is added to the squared length, and the number that
        the quotient is multiplied by."""
        found = self.origin(value)
        for given, inverse in () if found is None else _factors(found[0]):
            if inverse.op != "rsqrt" or inverse.dtype != torch.float32 or given.dtype != torch.float32:
                continue
            total = inverse.args[0]
            for square, small in orders(total) if total.op == "add" else ():
                eps = constant_of(small)
                if eps is None or not _is_sum(square, -1, keeps=True):
                    continue
                if any(first is given and second is given for first, second in _factors(square.args[0])):
                    return (given, eps), self.in_order(value, what)[1]
        raise NotRepresentedError(f"the {what} of a delta rule are not divided by their length")

    def _active(self, query: Value, key: Value, value: Value) -> tuple[Value, int]:
        """Returns the value that queries, keys and values are parts of, and the number of key heads."""
        heads, key_size, value_size = self._sizes
        parts = [self.origin(part) for part in (query, key, value)]
        found = [part for part in parts if part is not None]
        if len(found) < 3 or any(part[0] is not found[0][0] or part[2] != 1.0 for part in found):
            raise NotRepresentedError("queries, keys and values are not parts of one convolution")
        active = found[0][0]
        batch, channels, *others = self._elements.shape(active)
        key_heads = (channels - heads * value_size) // (2 * key_size)
        if others != [1] or key_heads <= 0 or heads % key_heads:
            raise NotRepresentedError("queries, keys and values have other sizes than the state")
        if 2 * key_heads * key_size + heads * value_size != channels:
            raise NotRepresentedError("queries, keys and values have other sizes than the state")
        starts = channels * torch.arange(batch)[:, None, None]
        head = torch.arange(heads)[:, None]
        own = head // (heads // key_heads) * key_size + torch.arange(key_size)
        values = 2 * key_heads * key_size + head * value_size + torch.arange(value_size)
        expected = (own, key_heads * key_size + own, values)
        for (_, places, _), places_there in zip(found, expected, strict=True):
            if not torch.equal(places.flatten(), (starts + places_there).flatten()):
                raise NotRepresentedError("queries, keys and values are in another order")
        return active, key_heads

    def _convolved(self, value: Value) -> Convolved:
        convolved, taken = self._elements.moved(value)
        if convolved.op != "convolution" or convolved.dtype != self._reader.dtype:
            raise NotRepresentedError(f"queries, keys and values are made with {convolved.op}")
        return ConvolutionReader(self._reader, convolved).read(taken)

    def _strength(self, value: Value) -> tuple[Value, float]:
        """Returns the sigmoid that strengths are, and the power of two that multiplies it."""
        sigmoid, factor = self.in_order(value, "strengths")
        is_exact = factor > 0 and math.frexp(factor)[0] == 0.5
        if sigmoid.op != "sigmoid" or not is_exact or sigmoid.dtype != self._reader.dtype:
            raise NotRepresentedError(f"the strengths of a delta rule are made with {sigmoid.op}")
        return sigmoid, factor

    def _columns(self, value: Value, what: str) -> tuple[Product, Value]:
        """Returns the columns of linear modules that all elements of a token are, in order."""
        terms = self._elements.terms(value, lambda v: v.op == "linear")
        found = None
        if len(terms) == 1 and terms[0].is_plain:
            origin, place = terms[0].cells[1:3].long()
            width = origin.numel() // self._elements.size(self._reader.program.batch)
            found = self._reader.product(self._elements.columns_at(origin, place, width))
        if found is None:
            raise NotRepresentedError(f"the {what} of a delta rule come from no linear module alone")
        return found

    def _decay(self, value: Value) -> tuple[Tensor, Tensor, Value]:
        """Returns the rates, the bias, and the columns, of exp(-exp(rate) * softplus(columns + bias))."""
        unknown = NotRepresentedError("the decay of a delta rule is computed in an unknown way")
        decay, factor = self.in_order(value, "decays")
        if decay.op != "exp" or factor != 1.0 or decay.dtype != torch.float32:
            raise unknown
        product, sign = self.in_order(decay.args[0], "decays")
        for first, second in _factors(product):
            rates, own = (first.args[0], -sign) if first.op == "neg" else (first, sign)
            if rates.op != "exp" or second.op != "softplus" or len(second.args) > 1 or second.kwargs:
                continue
            total = second.args[0]
            if own != -1.0 or total.op != "add" or total.dtype != torch.float32 or rates.dtype != total.dtype:
                raise unknown
            for columns, bias in orders(total):
                if isinstance(bias, Value) and widened(bias).op == "constant":
                    found = [self._reader.constant(widened(one)) for one in (rates.args[0], bias)]
                    if any(tuple(one.shape) != (self._sizes[0],) for one in found):
                        raise unknown
                    return found[0], found[1], columns
        raise unknown
