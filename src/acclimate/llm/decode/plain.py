"""One step of a described decoder in plain torch, on any device: the reference of the native step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from acclimate.llm.decode.cache import StepCache
from acclimate.llm.decode.description import (
    ACTIVATIONS,
    Attention,
    Convolution,
    Decoder,
    DeltaRule,
    Experts,
    Latent,
    Layer,
    Mlp,
    Norm,
    Product,
    Rotary,
    RotaryTable,
    Stack,
    TokenInput,
    TokenInputs,
)
from acclimate.llm.decode.finite_logits import check_logits
from acclimate.llm.decode.modules import embedding_rows, packed_stacks
from acclimate.llm.decode.trace import Trace


class Angles:
    """The numbers that rotate heads at some positions, computed once for all layers."""

    def __init__(self, tables: Sequence[RotaryTable], positions: Tensor) -> None:
        self._tables, self._positions = tables, positions
        self._known: dict[Rotary, tuple[Tensor, Tensor]] = {}

    def of(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Returns the factors of a rotation."""
        if rotary not in self._known:
            self._known[rotary] = rotary.factors(*self._tables[rotary.table](self._positions))
        return self._known[rotary]


class PlainStep:
    """Computes the logits after one more token of each sequence.

    Args:
        decoder: the description.
        cache: the earlier tokens' keys and values.
        starts: the position of each sequence's first token; earlier positions are padding.
        trace: what layers get and leave in a proof; ``None``: nothing.
    """

    def __init__(
        self, decoder: Decoder, cache: StepCache, starts: Tensor, trace: Trace | None = None
    ) -> None:
        self._decoder, self.cache, self._starts, self._trace = decoder, cache, starts, trace
        self._copy: int
        """Which copy of recurrent states a step reads."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """Returns batch x vocabulary logits in the model's dtype."""
        self.cache.reserve(self.cache.length + 1)
        self._copy = self.cache.begin_step()
        logits = self._logits(tokens)
        self.cache.end_step(1)
        check_logits(logits.amax(-1), self._decoder.dtype)
        return logits

    def likeliest(self, tokens: Tensor) -> Tensor:
        """Returns the token with the largest logit, for each sequence."""
        return self(tokens).float().argmax(-1)

    @torch.no_grad()
    def _logits(self, tokens: Tensor) -> Tensor:
        """Computes the logits, and stores the new tokens' keys and values."""
        decoder, positions = self._decoder, self._positions()
        tokens = decoder.tokens(tokens)
        x = embedding_rows(decoder.embedding, tokens, decoder.share)
        if decoder.embedding_multiplier != 1.0:
            x = (x.float() * decoder.embedding_multiplier).to(x.dtype)
        x = self._normed(decoder.embedding_norm, x)
        if decoder.positions is not None:
            x = x + decoder.positions[positions + decoder.position_offset]
        angles = Angles(decoder.tables, positions)
        own = None if decoder.token_inputs is None else _token_inputs(decoder.token_inputs, x, tokens)
        for index, layer in enumerate(decoder.layers):
            if self._trace is not None and index in self._trace.given:
                self._trace.inputs[index][: len(x)] = x
                x = self._trace.given[index][: len(x)].to(x.dtype)
            x = self._layer(index, layer, x, angles)
            if layer.token_input is not None and own is not None:
                x = x + _token_input(layer.token_input, x, own)
            x = _times(x, layer.multiplier)
        if self._trace is not None and self._trace.given:
            self._trace.inputs[len(decoder.layers)][: len(x)] = x
        x = _times(self._normed(decoder.norm, x), decoder.head_multiplier)
        logits: Tensor = decoder.head(x)
        if decoder.logit_multiplier != 1.0:
            logits = logits * decoder.logit_multiplier
        if decoder.logit_softcap is not None:
            logits = torch.tanh(logits / decoder.logit_softcap) * decoder.logit_softcap
        return logits

    def _positions(self) -> Tensor:
        """Returns the position of each sequence's new token."""
        return self.cache.length - self._starts

    def _layer(self, index: int, layer: Layer, x: Tensor, angles: Angles) -> Tensor:
        start = self._normed(layer.mixer_norm, x)
        if isinstance(layer.mixer, Attention):
            mixed = self._attention(index, layer.mixer, start, angles)
        elif isinstance(layer.mixer, Convolution):
            mixed = self._convolution(index, layer.mixer, start)
        else:
            mixed = self._delta_rule(index, layer.mixer, start)
        mixed = _times(self._normed(layer.mixer_post_norm, mixed), layer.mixer_multiplier)
        if layer.parallel:
            inner = self._normed(layer.mlp_norm, start if layer.mlp_shares_norm else x)
        else:
            x, inner = self._added(x, mixed, layer.mlp_norm)
        mlp = layer.mlp
        result = self._mlp(mlp, inner) if isinstance(mlp, Mlp) else self._experts(index, mlp, inner, x)
        result = _times(self._normed(layer.mlp_post_norm, result), layer.mlp_multiplier)
        if not layer.parallel:
            return x + result
        return x + (mixed + result) if layer.adds_branches_first else (x + mixed) + result

    def _normed(self, norm: Norm | None, x: Tensor) -> Tensor:
        return x if norm is None else norm(x)

    def _added(self, x: Tensor, added: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """Returns the sum, and its norm."""
        total = x + added
        return total, self._normed(norm, total)

    def _multiplied(self, module: nn.Module, x: Tensor) -> Tensor:
        """Returns what a linear module gives."""
        result: Tensor = module(x)
        return result

    def _computed(self, x: Tensor, *products: Product | None) -> dict[int, Tensor]:
        """Returns what those modules of products with one input give that are computed at once."""
        return {}

    def _gated(self, activation: str, gate: Tensor, up: Tensor | None) -> Tensor:
        """Returns the activation of one tensor times another, which may be absent."""
        found = ACTIVATIONS[activation](gate)
        return found if up is None else found * up

    def _mlp(self, mlp: Mlp, x: Tensor) -> Tensor:
        memory = self._computed(x, mlp.up, mlp.gate)
        up = mlp.up(x, memory)
        gate = None if mlp.gate is None else mlp.gate(x, memory)
        inner = (
            self._gated(mlp.activation, up, None) if gate is None else self._gated(mlp.activation, gate, up)
        )
        return self._multiplied(mlp.down, inner)

    def _attention(self, index: int, attention: Attention, x: Tensor, angles: Angles) -> Tensor:
        query = self._stored_heads(index, attention, x, angles)
        mixed = self._mixed(index if attention.shares is None else attention.shares, attention, query)
        if attention.latent is not None:
            by_head = mixed.view(len(x), attention.heads, 1, -1)
            mixed = (by_head @ attention.latent.weights()[1].transpose(1, 2)).flatten(1)
        if attention.gate is not None:
            mixed = mixed * torch.sigmoid(attention.gate(x))
        return self._multiplied(attention.output, mixed)

    def _convolution(self, index: int, convolution: Convolution, x: Tensor) -> Tensor:
        memory = self._computed(x, convolution.first, convolution.second, convolution.gate)
        inputs = convolution.first(x, memory) * convolution.second(x, memory)
        found = self._convolved(index, convolution, inputs)
        return self._multiplied(convolution.output, convolution.gate(x, memory) * found)

    def _convolved(self, index: int, convolution: Convolution | DeltaRule, inputs: Tensor) -> Tensor:
        """Returns the sums over the last tokens of each channel; stores the new token's inputs."""
        self._store(index, inputs[:, None], inputs[:, None, :0])
        weights = convolution.weight[:, 0].t().float()
        found = (self._last_inputs(index, convolution.width).float() * weights).sum(1)
        if convolution.bias is not None:
            found = found + convolution.bias.float()
        return found.to(inputs.dtype)

    def _delta_rule(self, index: int, rule: DeltaRule, x: Tensor) -> Tensor:
        memory = self._computed(x, rule.given, rule.gate, rule.decay, rule.strength)
        active = ACTIVATIONS[rule.activation](self._convolved(index, rule, rule.given(x, memory))).float()
        keys = rule.key_heads * rule.key_size
        query, key, value = active.split((keys, keys, rule.heads * rule.value_size), -1)

        def unit(given: Tensor) -> Tensor:
            heads = given.view(len(x), rule.key_heads, rule.key_size)
            heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + rule.eps)
            return heads.repeat_interleave(rule.heads // rule.key_heads, 1)[..., None]

        key, query = unit(key), unit(query) * rule.scale
        decay = nn.functional.softplus(rule.decay(x, memory).float() + rule.decay_bias.float())
        decay = torch.exp(-rule.rate.float().exp() * decay)[..., None, None]
        strength = torch.sigmoid(rule.strength(x, memory)).float()[..., None] * rule.strength_factor
        state = self._state(index) * decay
        change = (value.view(len(x), rule.heads, -1) - (state * key).sum(-2)) * strength
        state = state + key * change[..., None, :]
        self._store_state(index, state)
        normed = rule.norm((state * query).sum(-2).to(x.dtype)).float()
        gate = ACTIVATIONS[rule.gate_activation](rule.gate(x, memory).float())
        return self._multiplied(rule.output, (normed.flatten(1) * gate).to(x.dtype))

    def _state(self, index: int) -> Tensor:
        """Returns a layer's recurrent state before the new token."""
        return self.cache.states[index][self._copy]

    def _store_state(self, index: int, state: Tensor) -> None:
        """Stores a layer's recurrent state after the new token."""
        self.cache.states[index][1 - self._copy] = state

    def _last_inputs(self, index: int, count: int) -> Tensor:
        """Returns the inputs of a convolution's last tokens, batch x count x channels; zeros before all."""
        end = self.cache.length + 1
        inputs = self.cache.held(index, max(end - count, 0), end)[0][:, 0]
        return nn.functional.pad(inputs, (0, 0, count - inputs.shape[1], 0))

    def _store(self, index: int, key: Tensor, value: Tensor) -> None:
        """Stores the new token's keys and values of a layer."""
        self.cache.put(index, self.cache.length, key, value)

    def _mixed(self, index: int, attention: Attention, query: Tensor) -> Tensor:
        """Returns each head's mixture of the values that a layer of the cache holds, batch x all elements."""
        end = self.cache.length + 1
        first = 0 if attention.window is None else max(0, end - attention.window)
        seen = torch.arange(first, end, device=query.device)[None] >= self._starts[:, None]
        return mixed_values(attention, query, *self.cache.held(index, first, end), seen)

    def _stored_heads(self, index: int, attention: Attention, x: Tensor, angles: Angles) -> Tensor:
        """Stores the new token's key and value, and returns its queries, batch x heads x size."""
        query, key, value = self._heads(attention, x, angles)
        if attention.shares is None:
            self._store(index, key, value)
        return query

    def _heads(self, attention: Attention, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the queries, keys and values of the new token: batch x heads x size each."""
        memory = self._computed(x, *attention.products)

        def rotated(found: Tensor) -> Tensor:
            rotary = attention.rotary
            return found if rotary is None else rotary(found, *angles.of(rotary))

        def prepared(product: Product, norm: Norm | None) -> Tensor:
            found = product(x, memory).view(len(x), -1, attention.head_size)
            if attention.rotary_first:
                found = rotated(found)
            if norm is not None:
                shape = found.shape
                found = norm(found if attention.norm_is_per_head else found.flatten(1)).view(shape)
            return found if attention.rotary_first else rotated(found)

        by_position: Tensor | None = None
        if attention.query_factors is not None:
            by_position = self._decoder.factors[attention.query_factors](self._positions())
        if attention.latent is not None:
            return _of_latent(attention, attention.latent, x, rotated, by_position)
        query = prepared(attention.query, attention.query_norm)
        if by_position is not None:
            query = query * by_position[:, None].to(query.dtype)
        if attention.shares is not None:
            return query, x, x  # neither is used
        key = prepared(attention.key, attention.key_norm)
        value = attention.value(x, memory).view(len(x), -1, attention.value_size)
        return query, key, value if attention.value_norm is None else attention.value_norm(value)

    def _experts(self, index: int, experts: Experts, x: Tensor, stream: Tensor) -> Tensor:
        """Returns the experts' result, and that of an MLP beside them, of a layer's normalized stream."""
        norms, routed, given = experts.norms, x, x
        if norms is not None:
            routed = _times(self._normed(norms.router, stream), norms.router_multiplier)
            given = self._normed(norms.inner, stream)
        if self._trace is None:
            weights, chosen = experts.router(routed)
        else:
            weights, chosen = self._trace.route(index, experts.router, routed)
        result = self._expert_sums(experts, given, weights, chosen).to(x.dtype)
        if experts.shared is None:
            return result
        shared = self._mlp(experts.shared, x)
        if experts.shared_gate is not None:
            shared = torch.sigmoid(experts.shared_gate(x)) * shared
        if norms is not None:
            result, shared = self._normed(norms.result, result), self._normed(norms.shared_result, shared)
        return result + shared

    def _expert_sums(self, experts: Experts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Returns the weighted sum of each token's experts in float32."""
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            tokens, places = torch.where(chosen == expert)
            gated = gated_values(experts, _stacked(experts.inner, expert, x[tokens]))
            found = _stacked(experts.down, expert, gated).float() * weights[tokens, places, None]
            total.index_add_(0, tokens, found.to(x.dtype).float() if experts.rounds_weighted else found)
        return total


def _of_latent(
    attention: Attention,
    latent: Latent,
    x: Tensor,
    rotated: Callable[[Tensor], Tensor],
    by_position: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the heads' queries of latents, and the key and the value of the one key head."""
    memory: dict[int, Tensor] = {}
    value = attention.value(x, memory)
    value = value if latent.norm is None else latent.norm(value)
    given, own = x, memory
    if latent.query is not None:
        given, own = latent.query(x, memory), {}
        given = given if latent.query_norm is None else latent.query_norm(given)

    def turned(heads: Tensor) -> Tensor:
        found = rotated(heads)
        return found.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if latent.splits_pairs else found

    heads = attention.query(given, own).view(len(x), attention.heads, -1)
    plain, rest = heads[..., : latent.key_size], turned(heads[..., latent.key_size :])
    if by_position is not None:
        plain, rest = (part * by_position[:, None].to(part.dtype) for part in (plain, rest))
    query = (latent.weights()[0] @ plain.unsqueeze(-1)).squeeze(-1)
    key = turned(attention.key(x, memory).view(len(x), 1, -1))
    return torch.cat((query, rest), -1), torch.cat((value[:, None], key), -1), value[:, None]


def _token_inputs(inputs: TokenInputs, x: Tensor, tokens: Tensor) -> Tensor:
    """Returns what tokens have for each layer: batch x layers x size."""
    row = _times(embedding_rows(inputs.table, tokens), inputs.table_multiplier)
    found = _times(inputs.product(x), inputs.product_multiplier).unflatten(-1, (-1, inputs.size))
    found = found if inputs.norm is None else inputs.norm(found)
    return _times(found + row.view_as(found), inputs.multiplier)


def _token_input(added: TokenInput, x: Tensor, own: Tensor) -> Tensor:
    inner = ACTIVATIONS[added.activation](added.gate(x)) * own[:, added.index]
    result: Tensor = added.output(inner)
    return result if added.norm is None else added.norm(result)


def mixed_values(attention: Attention, query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Returns each head's mixture of values in the query's dtype, batch x all elements; ``seen`` is batch x
    tokens."""
    grouped = query.float().view(len(query), attention.key_heads, -1, attention.head_size)
    scores = grouped @ keys.float().transpose(2, 3) * attention.scale
    if attention.softcap is not None:
        scores = torch.tanh(scores / attention.softcap) * attention.softcap
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    if attention.sinks is not None:
        sinks = attention.sinks.float().view(1, attention.key_heads, -1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ values.float()).to(query.dtype).view(len(query), -1)


def gated_values(experts: Experts, both: Tensor) -> Tensor:
    """Returns what the second product of experts multiplies, from the first products."""
    if not experts.gating.is_gated:
        return experts.gating(None, both)
    gate, up = (both[..., ::2], both[..., 1::2]) if experts.interleaved else both.chunk(2, -1)
    return experts.gating(gate, up)


def _stacked(stack: Stack, expert: int, x: Tensor) -> Tensor:
    bias = None if stack.bias is None else stack.bias[expert]
    packed = packed_stacks(stack.module).get(stack.name)
    if packed is not None:
        found: Tensor = packed.expert(expert).linear(x, bias)
        return found
    weight = getattr(stack.module, stack.name)[expert]
    return nn.functional.linear(x, weight.t() if stack.is_turned else weight, bias)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
