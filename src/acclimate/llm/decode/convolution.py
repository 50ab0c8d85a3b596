"""Matches a gated causal convolution over tokens, whose last inputs are in the cache.

Like ``match.py``, it reads operators backwards: from the output projection's input to the convolution, from
its inputs to the cache and to the new tokens', and from these to the linear modules that make them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from acclimate.llm.decode.description import Convolution, NotRepresentedError, Product
from acclimate.llm.decode.elements import Term
from acclimate.llm.decode.operators import orders, widened
from acclimate.llm.decode.program import Role, Value
from acclimate.llm.decode.reader import ProgramReader


@dataclass(frozen=True)
class FoundConvolution:
    """A convolution in a program."""

    convolution: Convolution
    source: Value
    """The input of the linear modules, where it is not that of padding."""
    layer: int
    """The layer in whose cache the inputs are."""


def find_convolution(reader: ProgramReader, output: nn.Module, value: Value) -> FoundConvolution | None:
    """Returns the gated convolution whose results a linear module ``output`` takes; ``None``: there is none.

    Raises:
        NotRepresentedError: there is one, in a form that a description cannot express.
    """
    product, places = reader.elements.moved(value)
    if product.op != "mul" or not all(isinstance(operand, Value) for operand in product.args[:2]):
        return None
    for gate, result in orders(product):
        convolved, taken = reader.elements.moved(result)
        if convolved.op == "convolution":
            if not torch.equal(places, _in_order(product, reader).transpose(1, 2)):
                raise NotRepresentedError("the results of a convolution are moved")
            return _gated(ConvolutionReader(reader, convolved), output, gate, taken)
    return None


def _gated(reader: ConvolutionReader, output: nn.Module, gate: Value, taken: Tensor) -> FoundConvolution:
    """Returns the convolution, given its gate, and the places of its results that are used."""
    found = reader.read(taken)
    new = found.new
    if new.op != "mul" or not all(isinstance(operand, Value) for operand in new.args[:2]):
        raise NotRepresentedError(f"the inputs of a convolution are made with {new.op}")
    (first, source), (second, other), (gates, third) = map(reader.columns, (*new.args[:2], gate))
    if other is not source or third is not source:
        raise NotRepresentedError("a convolution and its gates have different inputs")
    convolution = Convolution(first, second, gates, found.weight, found.bias, output)
    return FoundConvolution(convolution, reader.before_padding(source), found.layer)


@dataclass(frozen=True)
class Convolved:
    """What a causal convolution is made of."""

    weight: Tensor
    """Channels x 1 x tokens."""
    bias: Tensor | None
    new: Value
    """The new tokens' inputs, sequences x channels x tokens."""
    layer: int
    """The layer in whose cache earlier inputs are."""


class ConvolutionReader:
    """Reads one convolution of a program.

    Raises:
        NotRepresentedError: it is not causal, or its inputs are not those that a layer's cache keeps.
    """

    def __init__(self, reader: ProgramReader, convolved: Value) -> None:
        self._reader, self._elements, self._value = reader, reader.elements, convolved
        self._tokens = self._elements.size(reader.program.length)

    def read(self, taken: Tensor) -> Convolved:
        """Returns the convolution, given the places of its results that are used."""
        weight, bias = self._weights()
        layer, kept, new, earlier = self._inputs(self._value.args[0])
        self._check_places(taken, weight.shape[2], earlier)
        if kept != weight.shape[2]:
            raise NotRepresentedError("a convolution has another width than what its cache keeps")
        return Convolved(weight, bias, new, layer)

    def _weights(self) -> tuple[Tensor, Tensor | None]:
        """Returns the weights, channels x 1 x tokens, and the bias."""
        given, held, bias, stride, padding, dilation, is_transposed, _, groups = self._value.args
        source, places = self._elements.moved(held)
        weight = self._reader.constant(source)
        channels = self._elements.shape(given)[1]
        is_in_order = torch.equal(places.flatten(), torch.arange(places.numel()))
        if tuple(weight.shape[:2]) != (channels, 1) or weight.dim() != 3 or not is_in_order:
            raise NotRepresentedError("a convolution mixes channels")
        if (stride, dilation, is_transposed, groups, len(padding)) != ((1,), (1,), False, channels, 1):
            raise NotRepresentedError("a convolution of an unknown kind")
        return weight, None if bias is None else self._reader.constant(bias)

    def _inputs(self, given: Value) -> tuple[int, int, Value, int]:
        """Returns the layer in whose cache the earlier inputs are, how many it keeps, the new tokens' inputs,
        and how many earlier ones come before them.

        In a step, the cache's inputs are read and written by the program itself.
        """
        program = self._reader.program
        if given.op == "inputs":
            new, earlier, layer, kept = given.args
            changed = program.states.get(layer)
            if earlier != program.past or (changed is not None and changed.op != "kept_inputs"):
                raise NotRepresentedError("a layer's cache keeps other inputs than those of its convolution")
            return layer, kept, new, self._elements.size(earlier)
        joined = widened(given)
        new = joined.args[0][-1] if joined.op == "cat" else joined
        whole = self._plain(joined, new)
        origin = whole.cells[1].long()
        before, new_number = int(origin.flatten()[0]), self._elements.number(new)
        held = self._elements.origins[before]
        if held.op != "kept_inputs" or joined.op != "cat":
            raise NotRepresentedError("the inputs of a convolution do not come from its cache")
        _, _, kept, layer = held.args[:4]
        expected = torch.cat((self._cells(held, before), self._cells(new, new_number)), -1)
        changed = program.states[layer]
        is_kept = changed.op == "copy" and changed.args[0] is held
        if not is_kept or not _are_equal(self._plain(changed.args[1], new), expected[..., -kept:]):
            raise NotRepresentedError("a layer's cache keeps other inputs than those of its convolution")
        if not _are_equal(whole, expected):
            raise NotRepresentedError("the inputs of a convolution are in another order")
        return layer, kept, new, kept

    def _plain(self, value: Value, new: Value) -> Term:
        terms = self._elements.terms(value, lambda v: v.op == "kept_inputs" or v is new)
        if len(terms) != 1 or not terms[0].is_plain:
            raise NotRepresentedError("the inputs of a convolution are sums of several elements")
        return terms[0]

    def _cells(self, value: Value, number: int) -> Tensor:
        """Returns the origins and places of a value's own elements."""
        places = _in_order(value, self._reader)
        return torch.stack((torch.full_like(places, number), places))

    def _check_places(self, taken: Tensor, width: int, earlier: int) -> None:
        """Raises unless a token's result is made of its own input and of those before it."""
        padding = self._value.args[4][0]
        results = self._elements.shape(self._value)
        # A result at a place is made of `width` inputs, of which the first is at that place less the padding.
        first = earlier + padding - width + 1
        rows = torch.arange(results[0] * results[1])[:, None] * results[2]
        expected = rows + first + torch.arange(self._tokens)
        if not torch.equal(taken.reshape(expected.shape), expected):
            raise NotRepresentedError("a convolution is not causal")

    def columns(self, value: Value) -> tuple[Product, Value]:
        """Returns the product that a value of all channels and tokens is, and its input."""
        terms = self._elements.terms(value, lambda v: v.op == "linear")
        found = None
        if len(terms) == 1 and terms[0].is_plain:
            origin, place = terms[0].mapped(lambda x: x.transpose(1, 2)).cells[1:3].long()
            found = self._reader.product(self._elements.columns_at(origin, place, origin.shape[-1]))
        if found is None:
            raise NotRepresentedError("a convolution comes from something else than linear modules")
        return found

    def before_padding(self, source: Value) -> Value:
        """Returns what was multiplied by the mask, which makes zeros of a prompt's padding."""
        program = self._reader.program
        if source.op == "mul" and isinstance(source.args[1], Value):
            operands: Iterator[tuple[Value, Value]] = orders(source)
            for given, factor in operands:
                mask, places = self._elements.moved(factor)
                is_mask = mask.op == "input" and mask.roles == Role.MASK
                if is_mask and self._elements.shape(mask)[1] == self._tokens and _is_by_token(places):
                    return given
        if program.length != 1:
            raise NotRepresentedError("padding comes into a convolution")
        return source


def _in_order(value: Value, reader: ProgramReader) -> Tensor:
    shape = reader.elements.shape(value)
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def _are_equal(term: Term, cells: Tensor) -> bool:
    return torch.equal(term.cells[1:3].long(), cells)


def _is_by_token(places: Tensor) -> bool:
    """Whether elements are those of a mask, one for each token of each sequence."""
    return places.shape[2:] == (1,) and torch.equal(places.flatten(), torch.arange(places.numel()))
