"""Matches a captured program to the operations that native code has, and refuses what it does not know.

It reads the program backwards from the logits. Nothing is looked up by name or class, and no value of a run
decides anything: constants, activations, windows and the order of elements are read from the operators.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.llm.decode.convolution import find_convolution
from acclimate.llm.decode.delta_rule import FoundDeltaRule, find_delta_rule
from acclimate.llm.decode.description import (
    Attention,
    Decoder,
    Experts,
    Layer,
    Mixer,
    Mlp,
    Norm,
    NotRepresentedError,
    Product,
    Rotary,
    Share,
    TokenInput,
    TokenInputs,
    shared_layer,
)
from acclimate.llm.decode.elements import MOVES, constant_of
from acclimate.llm.decode.experts import find_experts
from acclimate.llm.decode.latent import LatentHeads, find_latent
from acclimate.llm.decode.operators import activation_of, flat, orders, times_constant, widened
from acclimate.llm.decode.program import Program, Role, Value
from acclimate.llm.decode.reader import ProgramReader
from acclimate.llm.decode.tables import PositionColumns, flattened
from acclimate.llm.decode.users_code import users_classes

_NO_PRODUCT = Product(())


def match(model: Any, programs: Iterable[Program], share: Share | None) -> Decoder:
    """Returns the description of a model whose steps, and prompts if one is among the programs, are computed
    as it says.

    If none is, because its operators depend on its length, the description is also of prompts for code of
    transformers' own. The proof then compares prompts of several lengths.

    Raises:
        NotRepresentedError: an operator is not understood, or a prompt is computed otherwise than a step.
    """
    found = [_Matcher(model, program, share).decoder() for program in programs]
    describes_prompts = found[0].describes_prompts or not any(map(users_classes, model.modules()))
    constants = {id(tensor): tensor for decoder in found for tensor in decoder.constants}
    first, *others = (
        replace(decoder, constants=tuple(constants.values()), describes_prompts=describes_prompts)
        for decoder in found
    )
    for other in others:
        if _comparable(first) != _comparable(other):
            raise NotRepresentedError("a prompt is computed otherwise than a step")
    return first


def _comparable(value: Any) -> Any:
    """Returns a description with the identities of tensors in their place."""
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, tuple):
        return tuple(_comparable(part) for part in value)
    if is_dataclass(value) and type(value).__module__ == Decoder.__module__:
        return type(value), *(_comparable(getattr(value, field.name)) for field in fields(value))
    return value


@dataclass(frozen=True)
class _Branch:
    """What a layer adds to the hidden states, normalized and multiplied."""

    result: Value
    norm: Norm | None
    factor: float


@dataclass(frozen=True)
class _Heads:
    """Where queries, keys or values come from."""

    product: Product
    source: Value
    """The linear modules' input."""
    norm: Norm | None = None
    norm_is_per_head: bool = True
    rotary: Rotary | None = None
    rotary_first: bool = False
    factor: float = 1.0
    factors: PositionColumns | None = None
    """What they are multiplied by after the rotation, for each position."""


class _Matcher(ProgramReader):
    """Matches one program."""

    def __init__(self, model: Any, program: Program, share: Share | None) -> None:
        super().__init__(model, program)
        self.share = share
        self.factors: list[PositionColumns] = []
        self._replaced: set[tuple[tuple[int, ...], int] | None] = set()
        """What each embedding's tokens are replaced by."""
        self._token_inputs: tuple[TokenInputs, Value, Value] | None = None
        """What tokens have for each layer, the value that this is, and the input of its product."""
        self._shared_rows: set[int] = set()
        """The weights of the normalizations of queries and keys whose rows ranks share."""

    def decoder(self) -> Decoder:
        """Returns the description of the program."""
        head, factor, cap, hidden = self._head(self.program.logits)
        layers: list[Layer] = []
        count = int(self.model.config.get_text_config().num_hidden_layers)
        scaled = times_constant(flat(hidden))
        hidden, multiplied = (hidden, 1.0) if scaled is None else scaled
        normed = self.norm(flat(hidden))
        norm, stream = (None, hidden) if normed is None else (normed.norm, normed.given)
        while (found := self._embedding(flat(stream))) is None:
            number = count - 1 - len(layers)
            try:
                layer, stream = self._layer(stream)
            except NotRepresentedError as reason:
                if number < 0:
                    raise NotRepresentedError(
                        f"the first layer's input is made with {flat(stream).op}"
                    ) from reason
                raise NotRepresentedError(f"layer {number}: {reason}") from reason
            layers.append(layer)
        layers.reverse()
        if not layers:
            raise NotRepresentedError("it has no layers")
        self._check_caches(layers)
        if self.share is not None and self._shared_rows != set(map(id, self.share.rows)):
            raise NotRepresentedError("ranks share a normalization that is not of queries or keys")
        token_inputs = self._token_inputs_of(stream, layers)
        table, multiplier, embedding_norm, positions, offset = found
        replaced, *others = self._replaced
        if others:
            raise NotRepresentedError("embeddings are of different tokens")
        width, vocabulary = int(stream.shape[-1]), int(self.program.logits.shape[-1])
        return Decoder(
            replaced, table, multiplier, embedding_norm, positions, offset, tuple(self.tables),
            tuple(self.factors), token_inputs, tuple(layers), norm, multiplied, head, factor, cap, self.dtype,
            width, vocabulary, self.share, self.program.limit, self.program.constants,
            self.program.length != 1,
        )  # fmt: skip

    _caches: list[tuple[int, Value | None, Value | None]]
    """Of each layer, from the last one: in which layer's cache its keys and values are, and these."""

    def _check_caches(self, layers: list[Layer]) -> None:
        """Raises unless the first layers have caches of their own, in order, and others use some of these."""
        caches = self._caches[::-1]
        own = [
            place
            for layer, (place, *_) in zip(layers, caches, strict=True)
            if shared_layer(layer.mixer) is None
        ]
        if own != list(range(len(own))) or [place for place, *_ in caches[: len(own)]] != own:
            raise NotRepresentedError("the caches of layers are in another order")
        for layer, (place, key, value) in zip(layers, caches, strict=True):
            if shared_layer(layer.mixer) is None:
                continue
            if place >= len(own) or caches[place][1] is not key or caches[place][2] is not value:
                raise NotRepresentedError("a layer uses keys and values that no other layer has stored")
            stored = layers[place].mixer
            is_plain = isinstance(stored, Attention) and stored.latent is None
            if not is_plain or stored.window != layer.mixer.window:
                raise NotRepresentedError("layers with the same keys and values see other tokens")

    # -- what a token has for each layer ---------------------------------------------------------------

    def _token_input(self, value: Value) -> tuple[TokenInput, Value] | None:
        """Returns what of a token's own numbers for a layer is added to its result, and that result."""
        for stream, other in self._sums(value):
            branch = self._branch(other)
            output = self.output_of(branch.result)
            if output is None or branch.factor != 1.0 or output[1].op != "mul":
                continue
            for first, second in orders(output[1]):
                active = activation_of(first)
                gate = None if active is None else self.columns(active[1])
                if active is None or gate is None or flat(gate[1]) is not flat(stream):
                    continue
                index = self._number_of_layer(second)
                if index is not None:
                    return TokenInput(index, gate[0], active[0], output[0], branch.norm), stream
        return None

    def _number_of_layer(self, value: Any) -> int | None:
        """Returns for which layer a value is what tokens have for each layer."""
        if not isinstance(value, Value):
            return None
        source, places = self.elements.moved(value)
        if self._token_inputs is None:
            self._token_inputs = self._find_token_inputs(source)
        if self._token_inputs is None or self._token_inputs[1] is not source:
            return None
        size, width = self._token_inputs[0].size, self._token_inputs[0].product.width
        places = places.reshape(-1, size)
        first = torch.arange(len(places))[:, None] * width + torch.arange(size)
        index = int(places[0, 0]) // size
        return index if torch.equal(places, first + index * size) else None

    def _find_token_inputs(self, value: Value) -> tuple[TokenInputs, Value, Value] | None:
        """Reads the sum of a normalized product of the first layer's input and of a row of a table."""
        scaled = times_constant(value)
        total, multiplier = (value, 1.0) if scaled is None else scaled
        if total.op != "add" or len(total.shape) != 4 or not isinstance(total.args[1], Value):
            return None
        for projected, row in orders(total):
            normed = self.norm(projected)
            if normed is None or normed.given.shape[-1] != value.shape[-1]:
                continue
            product, places = self.elements.moved(normed.given)
            looked_up, row_places = self.elements.moved(row)
            if not all(torch.equal(p.flatten(), torch.arange(p.numel())) for p in (places, row_places)):
                continue
            scaled = times_constant(product)
            product, factor = (product, 1.0) if scaled is None else scaled
            found = self.columns(product)
            if found is None or looked_up.roles & Role.TOKENS == 0:
                continue
            table, table_factor = self._rows(looked_up)
            size = int(value.shape[-1])
            made = TokenInputs(table, table_factor, found[0], factor, normed.norm, size, multiplier)
            return made, value, found[1]
        return None

    def _token_inputs_of(self, stream: Value, layers: list[Layer]) -> TokenInputs | None:
        """Returns what tokens have for each layer, if each layer uses its own part."""
        used = [layer.token_input.index for layer in layers if layer.token_input is not None]
        if not used or self._token_inputs is None:
            return None
        found, _, given = self._token_inputs
        if used != list(range(len(layers))) or found.product.width != len(layers) * found.size:
            raise NotRepresentedError("layers use other parts of what tokens have for them")
        if flat(given) is not flat(stream):
            raise NotRepresentedError("what tokens have for layers is not made of the first layer's input")
        if self.share is not None:
            raise NotRepresentedError("a step of several ranks does not support what tokens have for layers")
        return found

    # -- the ends ----------------------------------------------------------------------------------

    def _head(self, logits: Value) -> tuple[nn.Module, float, float | None, Value]:
        self._caches = []
        value, factor, cap = widened(logits), 1.0, None
        scaled = times_constant(value)
        if scaled is not None and widened(scaled[0]).op == "tanh":
            cap = scaled[1]
            inner = times_constant(widened(widened(scaled[0]).args[0]))
            if inner is None or not math.isclose(inner[1] * cap, 1.0, rel_tol=1e-2):
                raise NotRepresentedError("the logits are bounded in an unknown way")
            value = widened(inner[0])
            scaled = times_constant(value)
        if scaled is not None:
            value, factor = widened(scaled[0]), scaled[1]
        if value.op != "linear":
            raise NotRepresentedError(f"the logits come from {value.op}, not from one linear module")
        return self.program.modules[value.args[1]], factor, cap, value.args[0]

    def _embedding(self, stream: Value) -> tuple[nn.Module, float, Norm | None, Tensor | None, int] | None:
        """Returns the tokens' embedding, its norm and that of positions, if the stream begins here."""
        if stream.roles & (Role.MASK | Role.POSITIONS | Role.CACHE) == 0:
            normed = self.norm(stream)
            if normed is None:
                return (*self._rows(stream), None, None, 0)
            return (*self._rows(flat(normed.given)), normed.norm, None, 0)
        if stream.op == "add":
            for value, other in orders(stream):
                if isinstance(other, Value) and other.roles & Role.TOKENS == 0 and other.op == "embedding":
                    table, place = other.args[:2]
                    return (*self._rows(value), None, self.constant(table), self._offset(place))
        return None

    def _offset(self, place: Value) -> int:
        if place.op == "input" and place.roles == Role.POSITIONS:
            return 0
        if place.op == "add" and place.args[0].op == "input" and place.args[0].roles == Role.POSITIONS:
            offset = constant_of(place.args[1])
            if offset is not None and offset == int(offset) >= 0:
                return int(offset)
        raise NotRepresentedError("a position embedding is looked up in an unknown way")

    def _rows(self, value: Value) -> tuple[nn.Module, float]:
        factor = 1.0
        scaled = times_constant(value)
        if scaled is not None:
            value, factor = scaled
        if value.op == "rows":
            self._replaced.add(self._replaced_tokens(value.args[0]))
            return self.program.modules[value.args[1]], factor
        if value.op == "embedding":
            weight = self.constant(value.args[0])
            for module in self.model.modules():
                if isinstance(module, nn.Embedding) and module._parameters.get("weight") is weight:
                    self._replaced.add(self._replaced_tokens(value.args[1]))
                    return module, factor
        raise NotRepresentedError(f"the first layer's input is made with {value.op}")

    def _replaced_tokens(self, tokens: Value) -> tuple[tuple[int, ...], int] | None:
        """Returns which of the model's tokens an embedding replaces, and by which one."""
        if _are_tokens(tokens):
            return None
        if tokens.op != "where" or not _are_tokens(tokens.args[2]):
            raise NotRepresentedError(f"an embedding's tokens are made with {tokens.op}")
        by = _whole_number(tokens.args[1])
        found, left = [], [tokens.args[0]]
        while left:
            condition = left.pop()
            if condition.op in ("bitwise_or", "logical_or"):
                left += condition.args[:2]
                continue
            number = _whole_number(condition.args[1]) if condition.op == "eq" else None
            if number is None or not _are_tokens(condition.args[0]):
                raise NotRepresentedError("tokens are replaced in an unknown way")
            found.append(number)
        if by is None:
            raise NotRepresentedError("tokens are replaced in an unknown way")
        return tuple(sorted(set(found))), by

    # -- a layer -----------------------------------------------------------------------------------

    def _layer(self, out: Value) -> tuple[Layer, Value]:
        """Returns the layer that ends with a stream, and the stream that it begins with."""
        scaled = times_constant(flat(out))
        out, multiplier = (out, 1.0) if scaled is None else scaled
        added = self._token_input(out)
        if added is not None:
            out = added[1]
        end = None if added is None else added[0], multiplier
        for stream, branch in self._sums(out):
            found = self._mlp(branch)
            start = None if found is None else self._starts(found[2], stream)
            if found is None or start is None:
                continue
            for before, other in self._sums(stream):
                mixer = self._mixer(other, before)
                if mixer is not None:
                    return self._made(mixer, found, start[0], None, False, end), before
        for before, first, second, adds_branches_first in self._threes(out):
            found = self._mlp(second)
            mixer = None if found is None else self._mixer(first, before)
            if found is None or mixer is None:
                continue
            if flat(mixer[3]) is flat(found[2]):
                return self._made(mixer, found, None, "shared", adds_branches_first, end), before
            own = self._starts(found[2], before)
            if own is not None:
                return self._made(mixer, found, own[0], "own", adds_branches_first, end), before
        raise NotRepresentedError(self._reason(out))

    def _reason(self, out: Value) -> str:
        """Says what a layer adds to its input that is no mixer and no MLP of a description."""
        addends, left = [], [flat(out)]
        for _ in range(3):  # a layer of sequential or parallel branches, and its input
            pairs = [operand for value in left for pair in self._sums(value) for operand in pair[1:]]
            left = [flat(operand) for operand in pairs]
            addends += left
        stops = {id(value) for value in addends}
        for value in addends:
            result = self._branch(value).result
            output = self.output_of(result)
            if output is None or self._attended(output[1]) is not None or self._mlp(value) is not None:
                continue
            if find_convolution(self, *output) is not None or find_delta_rule(self, *output) is not None:
                continue
            operators = self._operators(output[1], stops)
            named = ", ".join([op.lstrip("_") for op in operators if op not in _UNNAMED][:3])
            if "attention" in operators:
                return f"its attention is followed by {named}, which the step does not have there"
            if "past" in operators:
                return f"its attention is computed with {named}, not by an attention function of transformers"
            kind = "recurrent state" if "state" in operators else "MLP"
            kind = "convolution" if "convolution" in operators and kind == "MLP" else kind
            return f"its {kind} is computed with {named}, in a way that the step does not have"
        return "it is not a sum of its input, attention, a convolution or a delta rule, and an MLP"

    def _operators(self, value: Value, stops: set[int]) -> list[str]:
        """Returns the operators that compute a value, the last ones first; not those before ``stops``."""
        found: list[str] = []
        left, seen = [value], set(stops)
        while left:
            value = left.pop(0)
            if id(value) in seen:
                continue
            seen.add(id(value))
            normed = self.norm(value)
            if normed is not None:
                left.append(normed.given)
            else:
                left += [item for item in flattened(value.args) if isinstance(item, Value)]
            # A layer's input is normalized in all models.
            is_first = normed is not None and id(flat(normed.given)) in stops
            op = "a normalization" if normed is not None else value.op
            if op not in found and not is_first:
                found.append(op)
        return found

    def _made(
        self,
        mixer: tuple[_Branch, Norm | None, Mixer, Value],
        mlp: tuple[_Branch, Mlp | Experts, Value],
        norm: Norm | None,
        parallel: str | None,
        adds_branches_first: bool,
        end: tuple[TokenInput | None, float],
    ) -> Layer:
        first, second = mixer[0], mlp[0]
        return Layer(
            mixer[1], mixer[2], first.norm, first.factor, norm, mlp[1], second.norm, second.factor,
            parallel is not None, adds_branches_first, parallel == "shared", *end,
        )  # fmt: skip

    def _sums(self, value: Value) -> Iterator[tuple[Value, Value]]:
        """Yields the two ways in which a sum is a stream and a branch."""
        value = flat(value)
        if value.op != "add" or not isinstance(value.args[1], Value):
            return
        if value.args[0].shape == value.shape == value.args[1].shape:
            yield from orders(value)

    def _threes(self, value: Value) -> Iterator[tuple[Value, Value, Value, bool]]:
        """Yields the ways in which a sum is a stream and two branches, and whether these are added first."""
        for inner, third in self._sums(value):
            for first, second in self._sums(inner):
                yield third, first, second, True
                yield first, second, third, False
                yield first, third, second, False

    def _starts(self, given: Value, stream: Value) -> tuple[Norm | None] | None:
        """Returns the normalization between a stream and a branch's input, if there is at most that."""
        given, stream = flat(given), flat(stream)
        if given is stream:
            return (None,)
        normed = self.norm(given)
        # A stream that begins with a norm is rounded, and widened again for the next norm.
        return (normed.norm,) if normed is not None and flat(normed.given) is widened(stream) else None

    def _branch(self, value: Value) -> _Branch:
        factor, norm, value = 1.0, None, flat(value)
        scaled = times_constant(value)
        if scaled is not None:
            value, factor = flat(scaled[0]), scaled[1]
        normed = self.norm(value)
        if normed is not None:
            norm, value = normed.norm, flat(normed.given)
        return _Branch(value, norm, factor)

    # -- the MLP -----------------------------------------------------------------------------------

    def _mlp(self, value: Value) -> tuple[_Branch, Mlp | Experts, Value] | None:
        """Returns the branch of an MLP or of experts, these, and the input of their first products."""
        branch = self._branch(value)
        found = self.dense_mlp(branch.result)
        if found is not None:
            return branch, found[0], found[1]
        experts = find_experts(self, branch.result)
        return None if experts is None else (branch, experts[0], experts[1])

    # -- attention, convolutions and delta rules ---------------------------------------------------

    def _mixer(self, value: Value, stream: Value) -> tuple[_Branch, Norm | None, Mixer, Value] | None:
        """Returns the branch of what mixes tokens, the normalization of its input, itself, and its input."""
        branch = self._branch(value)
        output = self.output_of(branch.result)
        if output is None:
            return None
        attended = self._attended(output[1])
        if attended is not None:
            return self._attention(branch, *attended, output[0], stream)
        convolution = find_convolution(self, *output)
        rule = find_delta_rule(self, *output) if convolution is None else None
        found = convolution or rule
        start = None if found is None else self._starts(found.source, stream)
        if found is None or start is None:
            return None
        self._caches.append((found.layer, None, None))
        mixer: Mixer = found.rule if isinstance(found, FoundDeltaRule) else found.convolution
        return branch, start[0], mixer, found.source

    def _attended(self, value: Value) -> tuple[Value, tuple[Product, Value] | None] | None:
        """Returns the attention that an output projection takes, and what its result is multiplied by the
        sigmoid of: a product, and the input of that."""
        call = self.attention_of(value)
        if call is not None:
            return call, None
        if value.op != "mul" or value.dtype != self.dtype:
            return None
        for result, factor in orders(value):
            if not isinstance(factor, Value) or factor.op != "sigmoid" or factor.dtype != self.dtype:
                continue
            call, gate = self.attention_of(result), self.columns(factor.args[0])
            if call is not None and gate is not None and result.shape == factor.shape:
                return call, gate
        return None

    def _attention(
        self,
        branch: _Branch,
        call: Value,
        gate: tuple[Product, Value] | None,
        output: nn.Module,
        stream: Value,
    ) -> tuple[_Branch, Norm | None, Mixer, Value] | None:
        query, key, held, mask, scale, softcap, sinks = call.args
        latent = find_latent(self, query, key, held)
        if latent is not None and gate is not None:
            raise NotRepresentedError("attention with latents has a gate")
        if latent is not None:
            start = self._starts(latent.source, stream)
            if start is None:
                return None
            return branch, start[0], self._latent(latent, call, output), latent.source
        place = self.cached(key, True)
        if place != self.cached(held, False):
            raise NotRepresentedError("keys and values come from different layers")
        new_key, new_value = key.args[0], held.args[0]
        heads, size = int(query.shape[1]), int(query.shape[3])
        key_heads, value_size = int(new_key.shape[1]), int(new_value.shape[3])
        if heads % key_heads or new_value.shape[1] != key_heads:
            raise NotRepresentedError("query heads do not divide evenly over key heads")
        q, k, v = (
            self._heads(moved, int(moved.shape[1]), int(moved.shape[3]))
            for moved in (query, new_key, new_value)
        )
        if v.rotary is not None or v.factor != 1.0 or v.factors is not None:
            raise NotRepresentedError("values are rotated or multiplied")
        if v.norm is not None and not v.norm_is_per_head:
            raise NotRepresentedError("the values of all heads are normalized together")
        if k.factor != 1.0 or k.factors is not None:
            raise NotRepresentedError("keys are multiplied by a number")
        q, k = self._on_ranks(q), self._on_ranks(k)
        ways = [(h.rotary, h.rotary_first, h.norm is None, h.norm_is_per_head) for h in (q, k)]
        if ways[0] != ways[1]:
            raise NotRepresentedError("queries and keys are treated differently")
        if k.source is not v.source:
            raise NotRepresentedError("keys and values have different inputs")
        if gate is not None and gate[1] is not q.source:
            raise NotRepresentedError("attention and its gate have different inputs")
        is_own = q.source is k.source
        start = self._starts(q.source, stream)
        if start is None:
            return None
        self._caches.append((place, key, held))
        scale = size**-0.5 if scale is None else scale
        products, norms = (k.product, v.product), (k.norm, v.norm)
        return branch, start[0], Attention(
            q.product, *(products if is_own else (_NO_PRODUCT, _NO_PRODUCT)), q.norm,
            *(norms if is_own else (None, None)), q.norm_is_per_head, q.rotary, q.rotary_first,
            self._factors(q.factors), heads, key_heads, size, value_size, scale * q.factor,
            self._window(mask), softcap, None if sinks is None else self.constant(widened(sinks)),
            output, None, None if is_own else place, None if gate is None else gate[0],
        ), q.source  # fmt: skip

    def _on_ranks(self, heads: _Heads) -> _Heads:
        """Returns heads whose normalization says which part of a row this rank has."""
        norm = heads.norm
        if norm is None or norm.weight is None or self.share is None or norm.weight not in self.share.rows:
            return heads
        if norm.kind != "rms" or heads.norm_is_per_head:
            raise NotRepresentedError("ranks share the rows of a normalization that is not a plain one")
        self._shared_rows.add(id(norm.weight))
        return replace(heads, norm=replace(norm, shared=self.share.rows[norm.weight]))

    def _latent(self, found: LatentHeads, call: Value, output: nn.Module) -> Attention:
        """Returns attention whose keys and values are made of latents."""
        query, key, held, mask, scale, softcap, sinks = call.args
        self._caches.append((found.layer, key, held))
        scale = int(query.shape[3]) ** -0.5 if scale is None else scale
        size = found.value.width
        return Attention(
            found.query, found.key, found.value, None, None, None, True, found.rotary, False,
            self._factors(found.factors), int(query.shape[1]), 1, size + found.key.width, size,
            scale * found.factor, self._window(mask), softcap,
            None if sinks is None else self.constant(widened(sinks)), output, found.latent, None, None,
        )  # fmt: skip

    def _factors(self, function: PositionColumns | None) -> int | None:
        """Returns the index of a function in the description; ``None``: there is none."""
        if function is None:
            return None
        if function not in self.factors:
            self.factors.append(function)
        return self.factors.index(function)

    def _check_heads(self, source: Value, places: Tensor) -> None:
        """Raises unless a value with heads has the elements of a source with heads in their places."""
        rest = self.elements.within_token(source, places)
        shape = places.shape  # sequences x heads x tokens x size
        expected = torch.arange(shape[1] * shape[3]).reshape(1, shape[1], 1, shape[3]).expand(shape)
        if rest is None or not torch.equal(rest, expected):
            raise NotRepresentedError("heads are mixed between normalization and attention")

    def _heads(self, value: Value, heads: int, size: int) -> _Heads:
        """Finds where queries, keys or values come from: rotation, normalization, linear modules' columns.

        Args:
            value: sequences x heads x tokens x size, or with tokens before heads inside of a normalization.
            heads: the number of heads.
            size: the number of elements of a head.
        """

        def is_origin(v: Value) -> bool:
            return v.op == "linear" or self.norm(v) is not None

        terms = [t for t in self.elements.terms(value, is_origin) if bool((t.factor != 0).any())]
        shape = self.elements.shape(value)
        if len(shape) != 4:
            raise NotRepresentedError("heads have no dimension of their own")
        # Before a norm that comes last, tokens may stand before heads.
        if shape[1] != heads or (shape[1] == shape[2] and value.shape[1] != heads):
            terms = [t.mapped(lambda x: x.transpose(1, 2)) for t in terms]
        origin, place, rotary, factor, factors = self.unrotated(terms)
        numbers = origin.unique().tolist()
        first = self.elements.origins[numbers[0]]
        normed = self.norm(first)
        if normed is None:
            origin, place = (t.transpose(1, 2).flatten(2) for t in (origin, place))
            found = self.product(self.elements.columns_at(origin, place, heads * size))
            if found is None:
                raise NotRepresentedError(f"heads come from {first.op}, not from linear modules only")
            return _Heads(found[0], found[1], None, True, rotary, False, factor, factors)
        if len(numbers) > 1:
            raise NotRepresentedError("heads come from several normalizations")
        self._check_heads(first, place)
        per_head = normed.given.shape[-1] == size and len(normed.given.shape) == 4
        if not per_head and normed.given.shape[-1] != heads * size:
            raise NotRepresentedError("a normalization is of neither one head nor all of them")
        if per_head:
            inner = self._heads(normed.given, heads, size)
            if inner.norm is not None or (inner.rotary is not None and rotary is not None):
                raise NotRepresentedError("heads are normalized or rotated twice")
            if inner.factors is not None or inner.factor != 1.0:
                raise NotRepresentedError("heads are multiplied before they are normalized")
            is_rotated = inner.rotary is not None
            return replace(
                inner, norm=normed.norm, rotary=rotary or inner.rotary, rotary_first=is_rotated,
                factor=factor, factors=factors,
            )  # fmt: skip
        columns = self.columns(normed.given)
        if columns is None:
            raise NotRepresentedError("a normalization's input is not made of linear modules only")
        return _Heads(columns[0], columns[1], normed.norm, False, rotary, False, factor, factors)

    # -- the mask ------------------------------------------------------------------------------------

    def _window(self, mask: Value | None) -> int | None:
        """Returns the window of a causal mask that also leaves out padding."""
        if mask is None:
            raise NotRepresentedError("attention has no mask")
        rules = set(self._rules(mask))
        if not rules >= {"causal", "padding"}:
            raise NotRepresentedError("attention's mask is not causal")
        return min((rule for rule in rules if isinstance(rule, int)), default=None)

    def _rules(self, mask: Value) -> Iterator[str | int]:
        """Yields what must be true for a key to be seen: ``causal``, ``padding``, or the size of a window."""
        if mask.op in ("bitwise_and", "logical_and"):
            for operand in mask.args[:2]:
                yield from self._rules(operand)
        elif mask.op in ("expand", "unsqueeze", "slice", "view"):
            yield from self._rules(mask.args[0])
        elif mask.op in ("new_ones", "ones", "ones_like"):
            return
        elif (
            mask.op == "index" and mask.args[0].op in ("_to_copy", "ne") and mask.args[0].dtype == torch.bool
        ):
            source = mask.args[0].args[0]
            rows, keys = mask.args[1]
            if source.op != "input" or source.roles != Role.MASK:
                raise NotRepresentedError("attention's mask is unknown")
            if self._place(rows) != ("batch", 0) or self._place(keys) != ("key", 0):
                raise NotRepresentedError("attention's mask is unknown")
            yield "padding"
        elif mask.op in ("le", "lt", "ge", "gt"):
            yield self._comparison(mask)
        else:
            raise NotRepresentedError(f"attention's mask is made with {mask.op}")

    def _comparison(self, mask: Value) -> str | int:
        left, right, op = mask.args[0], mask.args[1], mask.op
        if op in ("ge", "gt"):
            left, right, op = right, left, {"ge": "le", "gt": "lt"}[op]
        (first, a), (second, b) = self._place(left), self._place(right)
        shift = int(b - a)  # left + a <= right + b
        if op == "lt":
            shift -= 1
        if (first, second) == ("key", "query") and shift == 0:
            return "causal"
        if (first, second) == ("query", "key") and shift >= 0:  # query - key <= shift
            return shift + 1
        raise NotRepresentedError("attention's mask is unknown")

    def _place(self, value: Value) -> tuple[str, Any]:
        """Returns which index a value counts, along the dimensions of a mask, and what is added to it."""
        if value.op in ("add", "sub") and not isinstance(value.args[1], Value):
            kind, shift = self._place(value.args[0])
            return kind, shift + value.args[1] if value.op == "add" else shift - value.args[1]
        if value.op in ("unsqueeze", "slice", "view", "expand"):
            kind, shift = self._place(value.args[0])
            return self._kind(value, shift) if kind == "any" and len(value.shape) == 4 else (kind, shift)
        if value.op == "arange" and len(value.args) == 1:
            return "any", 0
        raise NotRepresentedError("attention's mask is unknown")

    def _kind(self, value: Value, shift: Any) -> tuple[str, Any]:
        axes = [i for i, size in enumerate(value.shape) if size != 1]
        program = self.program
        if axes == [0] and value.shape[0] == program.batch:
            return "batch", shift
        if axes == [3] and value.shape[3] == program.past + program.length:
            return "key", shift
        if axes in ([2], []) and shift == program.past:
            return "query", 0
        raise NotRepresentedError("attention's mask is unknown")


_UNNAMED = {*MOVES, "_to_copy", "clone", "linear", "input", "constant", "past", "attention"}
"""Operators that say nothing of how a part of a layer is computed."""


def _are_tokens(value: Any) -> bool:
    return isinstance(value, Value) and value.op == "input" and value.roles == Role.TOKENS


def _whole_number(given: Any) -> int | None:
    """Returns the whole number that an argument is, if it is one."""
    if isinstance(given, Value) and given.op in ("scalar_tensor", "full"):
        given = given.args[-1]
    number = constant_of(given)
    return int(number) if number is not None and number == int(number) else None
