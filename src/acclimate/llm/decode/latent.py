"""Matches latent attention: a cache of one vector for each token, of which keys and values are products.

Like ``match.py``, it reads operators backwards: from attention's keys and values to the latents in the cache
and to the linear module that expands them, and from there to the layer's input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from acclimate.llm.decode.description import Latent, Norm, NotRepresentedError, Product, Rotary
from acclimate.llm.decode.elements import Term
from acclimate.llm.decode.modules import bias_of
from acclimate.llm.decode.program import Value
from acclimate.llm.decode.reader import ProgramReader
from acclimate.llm.decode.tables import PositionColumns


@dataclass(frozen=True)
class LatentHeads:
    """Where queries, and a cache's latents and keys, come from."""

    latent: Latent
    query: Product
    key: Product
    """The key that all heads share."""
    value: Product
    """The latent."""
    source: Value
    """The input of the first linear modules."""
    layer: int
    """The layer in whose cache they are."""
    rotary: Rotary | None
    factor: float
    """What queries are multiplied by."""
    factors: PositionColumns | None


@dataclass(frozen=True)
class _Part:
    """Elements of heads, before they are rotated: sequences x heads x tokens x size."""

    origin: Tensor
    place: Tensor
    rotary: Rotary | None = None
    splits_pairs: bool = False
    factor: float = 1.0
    factors: PositionColumns | None = None


def find_latent(reader: ProgramReader, query: Value, key: Value, held: Value) -> LatentHeads | None:
    """Returns where the queries, keys and values of latent attention come from; ``None``: keys and values are
    no products of what is in the cache.

    Raises:
        NotRepresentedError: they are, in a form that a description cannot express.
    """
    latent = _LatentReader(reader)
    keys, values = latent.single(key), latent.single(held)
    if keys is None or values is None:
        return None
    if latent.ops_of(keys) != {"linear", "past"} or latent.ops_of(values) != {"linear"}:
        return None
    return latent.read(query, keys, values)


class _LatentReader:
    def __init__(self, reader: ProgramReader) -> None:
        self._reader, self._elements = reader, reader.elements

    def ops_of(self, term: Term) -> set[str]:
        """Returns the operators that make the values from which elements come."""
        return {self._op(int(number)) for number in term.cells[1].unique().tolist()}

    def _op(self, number: int) -> str:
        return self._elements.origins[number].op

    def single(self, value: Value) -> Term | None:
        """Returns where the elements of keys or values come from, if they are just moved."""
        terms = self._elements.terms(value, lambda v: v.op in ("linear", "past"))
        return terms[0] if len(terms) == 1 and terms[0].is_plain else None

    def read(self, query: Value, key: Term, held: Term) -> LatentHeads:
        """Returns where everything comes from, given the elements of keys and values."""
        key_origin, key_place = key.cells[1:3].long()
        origin, place = held.cells[1:3].long()
        heads, value_size = key_origin.shape[1], origin.shape[3]
        if query.shape[1] != heads or origin.shape[1] != heads:
            raise NotRepresentedError("query heads share the keys that are made of a latent")
        is_shared = torch.tensor([self._op(number) == "past" for number in key_origin[0, 0, 0].tolist()])
        key_size = int((~is_shared).sum())
        if bool(is_shared[:key_size].any()):
            raise NotRepresentedError("the part of a key that heads share does not come last")
        keys = self._expanded(key_origin[..., :key_size], key_place[..., :key_size], heads)
        values = self._expanded(origin, place, heads)
        if keys[:3] != values[:3]:
            raise NotRepresentedError("keys and values are made of latents by different modules")
        module, rows, latents, _ = keys
        shared = self._shared(key_origin[..., key_size:], key_place[..., key_size:])
        layer = self._reader.cached(latents, True)
        if layer != self._reader.cached(shared, False):
            raise NotRepresentedError("a layer's latents and keys come from different layers")
        norm, value, source = self._latent(latents.args[0])
        turned = self._rotated(self._elements.terms(shared.args[0], _is_linear))
        if turned.factor != 1.0 or turned.factors is not None:
            raise NotRepresentedError("keys are multiplied by a number")
        found = self._product(turned.origin, turned.place)
        if found is None or found[1] is not source:
            raise NotRepresentedError("latents and keys have different inputs")
        first = self._query(query, key_size, turned)
        made = self._product(first.origin, first.place)
        if made is None:
            raise NotRepresentedError("queries come from something else than one linear module")
        inner, inner_norm = self._before(made[1], source)
        latent = Latent(
            inner, inner_norm, norm, module, rows, keys[3], values[3], key_size, value_size,
            turned.splits_pairs,
        )  # fmt: skip
        return LatentHeads(
            latent, made[0], found[0], value, source, layer, turned.rotary, first.factor, first.factors
        )

    def _expanded(self, origin: Tensor, place: Tensor, heads: int) -> tuple[nn.Module, int, Value, int]:
        """Returns the module that makes each head's part of a latent, its rows for a head, the latents, and
        the first of those rows."""
        found = self._product(origin, place)
        modules = set() if found is None else {part.module for part in found[0].parts}
        if found is None or len(modules) != 1:
            raise NotRepresentedError("keys and values are made of latents in an unknown way")
        module = modules.pop()
        if not isinstance(module, nn.Linear) or bias_of(module) is not None:
            raise NotRepresentedError("keys and values are not made of latents by a plain linear module")
        columns = torch.cat([torch.arange(part.first, part.first + part.count) for part in found[0].parts])
        width = self._elements.shape(self._elements.origins[int(origin.flatten()[0])])[-1]
        rows, first = width // heads, int(columns[0])
        expected = first + rows * torch.arange(heads)[:, None] + torch.arange(origin.shape[-1])
        if width % heads or not torch.equal(columns, expected.flatten()):
            raise NotRepresentedError("keys and values are rows of a module in another order")
        latents, places = self._elements.moved(found[1])
        if not _is_in_order(places):
            raise NotRepresentedError("latents are moved after they are stored")
        return module, rows, latents, first

    def _shared(self, origin: Tensor, place: Tensor) -> Value:
        """Returns the cached keys that all heads share."""
        value = self._elements.origins[int(origin.flatten()[0])]
        batch, _, tokens, size = origin.shape
        expected = torch.arange(batch * tokens * size).reshape(batch, 1, tokens, size)
        if not bool((origin == origin.flatten()[0]).all()) or not bool((place == expected).all()):
            raise NotRepresentedError("heads share a part of their keys in an unknown way")
        if self._elements.shape(value) != [batch, 1, tokens, size]:
            raise NotRepresentedError("heads share a part of their keys in an unknown way")
        return value

    def _latent(self, new: Value) -> tuple[Norm | None, Product, Value]:
        """Returns the normalization of a token's latent, the latent before it, and its modules' input."""
        given, places = self._elements.moved(new)
        normed = self._reader.norm(given)
        if normed is not None:
            if given.shape[-1] != new.shape[-1] or not _is_in_order(places):
                raise NotRepresentedError("latents are moved after they are normalized")
            new = normed.given
        found = self._reader.columns(new)
        if found is None:
            raise NotRepresentedError("latents come from something else than linear modules")
        return None if normed is None else normed.norm, *found

    def _rotated(self, terms: list[Term]) -> _Part:
        """Returns the elements of heads before a rotation, and the rotation."""
        terms = [term for term in terms if bool((term.factor != 0).any())]
        origin, place, rotary, factor, factors = self._reader.unrotated(terms)
        size = place.shape[-1]
        if rotary is None:
            return _Part(origin, place, None, False, factor, factors)
        if rotary.width != size:
            raise NotRepresentedError("a part of the elements that heads share is rotated")
        # Pairs that are side by side may be halves of a head afterwards.
        pairs = torch.arange(size).view(2, -1).t().flatten()
        if not rotary.interleaved and not _follow(place) and _follow(place[..., pairs]):
            rotary = replace(rotary, interleaved=True)
            return _Part(origin[..., pairs], place[..., pairs], rotary, True, factor, factors)
        return _Part(origin, place, rotary, False, factor, factors)

    def _query(self, query: Value, key_size: int, key: _Part) -> _Part:
        """Returns the elements of queries, which must be rotated as the shared part of keys is."""
        terms = self._elements.terms(query, _is_linear)
        plain = self._plain([term.mapped(lambda x: x[..., :key_size]) for term in terms])
        turned = self._rotated([term.mapped(lambda x: x[..., key_size:]) for term in terms])
        if (turned.rotary, turned.splits_pairs) != (key.rotary, key.splits_pairs):
            raise NotRepresentedError("queries and keys are rotated differently")
        if (turned.factor, turned.factors) != (plain.factor, plain.factors):
            raise NotRepresentedError("the parts of a query are multiplied by different numbers")
        origin = torch.cat((plain.origin, turned.origin), -1)
        place = torch.cat((plain.place, turned.place), -1)
        return _Part(origin, place, None, False, plain.factor, plain.factors)

    def _plain(self, terms: list[Term]) -> _Part:
        """Returns the elements of queries that are not rotated."""
        terms = [term for term in terms if bool((term.factor != 0).any())]
        cells = terms[0].cells
        factor = float(cells[0].flatten()[0])
        if len(terms) != 1 or not bool((cells[0] == factor).all()) or bool((cells[5] > 0).any()):
            raise NotRepresentedError("queries are sums of several elements")
        origin, place = cells[1:3].long()
        by_position = None
        if bool((cells[3] > 0).any()):
            angle = cells[3:5].long()
            by_position = self._reader.common(torch.stack((angle, angle), 1))
        return _Part(origin, place, None, False, factor, by_position)

    def _product(self, origin: Tensor, place: Tensor) -> tuple[Product, Value] | None:
        """Returns the product that the elements of all heads of a token are, and its input."""
        origin, place = (found.transpose(1, 2).flatten(2) for found in (origin, place))
        return self._reader.product(self._elements.columns_at(origin, place, origin.shape[-1]))

    def _before(self, given: Value, source: Value) -> tuple[Product | None, Norm | None]:
        """Returns what is between a layer's input and the product of queries."""
        if given is source:
            return None, None
        normed = self._reader.norm(given)
        found = self._reader.columns(given if normed is None else normed.given)
        if found is None or found[1] is not source:
            raise NotRepresentedError("queries, keys and values have different inputs")
        return found[0], None if normed is None else normed.norm


def _is_linear(value: Value) -> bool:
    return value.op == "linear"


def _is_in_order(places: Tensor) -> bool:
    return torch.equal(places.flatten(), torch.arange(places.numel()))


def _follow(place: Tensor) -> bool:
    """Whether elements are the ones that follow each other."""
    return bool((place.diff(dim=-1) == 1).all())
