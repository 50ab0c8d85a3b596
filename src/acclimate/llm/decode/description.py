"""Describes one step of a decoder as data: its weights, their order, and its constants.

A description is matched to a captured program (``match``), and used only if its results equal the model's
(``proof``). It refers to the model's own modules and tensors; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from acclimate.llm.split.collectives import Ranks


class NotRepresentedError(Exception):
    """A description cannot express a model; the message names the reason."""


class PositionFunction(Protocol):
    """Numbers that depend on a token's position."""

    @property
    def tensors(self) -> list[Tensor]:
        """The model's tensors of which they are computed."""

    def __call__(self, positions: Tensor) -> Tensor:
        """Returns positions x numbers."""


@dataclass(frozen=True)
class SharedRow:
    """One rank's part of the rows of a normalization that ranks share."""

    ranks: Ranks
    columns: int
    """The number of elements of all ranks."""
    counts: bool
    """Whether this rank's squares are added; else another rank has the same elements and adds them."""


@dataclass(frozen=True)
class Norm:
    """A normalization of the last dimension."""

    kind: Literal["rms", "layer"]
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    adds_one: bool
    """Whether the factor is one more than the weight."""
    rounds_first: bool
    """Whether the normalized values are rounded to the model's dtype before they are multiplied."""
    shared: SharedRow | None = None
    """Of which row this rank has a part; ``None``: each row is whole."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the normalized values, in the dtype of ``x``. Ranks that share a row make the same call."""
        shape = x.shape[-1:]
        given = x if self.rounds_first or self.weight is None else x.float()
        if self.shared is not None:
            squares = x.float().square().sum(-1, keepdim=True) * float(self.shared.counts)
            mean_square = self.shared.ranks.all_reduce(squares) / self.shared.columns
            y = (x.float() * torch.rsqrt(mean_square + self.eps)).to(given.dtype)
        elif self.kind == "layer":
            y = nn.functional.layer_norm(given, shape, eps=self.eps)
        else:
            y = nn.functional.rms_norm(given, shape, eps=self.eps)
        if self.weight is not None:
            weight = self.weight if self.rounds_first else self.weight.float()
            y = y * (weight + 1 if self.adds_one else weight)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.to(x.dtype)


@dataclass(frozen=True)
class Part:
    """Some columns of a linear module's output."""

    module: nn.Module
    first: int
    count: int


@dataclass(frozen=True)
class Product:
    """Columns of linear modules with the same input, one part after the other."""

    parts: tuple[Part, ...]

    @property
    def width(self) -> int:
        """The number of columns."""
        return sum(part.count for part in self.parts)

    def __call__(self, x: Tensor, memory: dict[int, Tensor] | None = None) -> Tensor:
        """Returns the columns; ``memory`` keeps outputs for other products with this input."""
        memory = {} if memory is None else memory
        for part in self.parts:
            if id(part.module) not in memory:
                memory[id(part.module)] = part.module(x)
        found = [memory[id(p.module)].narrow(-1, p.first, p.count) for p in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found, -1)


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines by position, computed by the model's own operators."""

    cos: PositionFunction
    sin: PositionFunction
    width: int
    """The number of elements that are rotated."""

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines for each pair of elements: positions x width / 2 each."""
        return self.cos(positions), self.sin(positions)


@dataclass(frozen=True)
class Rotary:
    """A rotary position embedding of queries and keys."""

    table: int
    """The index in ``Decoder.tables``."""
    width: int
    """The number of leading elements of a head that are rotated."""
    interleaved: bool
    """Whether the elements of a pair are side by side; else they are half a width apart."""
    rounds_products: bool
    """Whether each product is rounded to the model's dtype before they are added."""

    def factors(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what an element of a head and the other one of its pair are multiplied by.

        Args:
            cos, sin: of each pair, positions x width / 2.

        Returns:
            Positions x 1 x width each.
        """
        if not self.rounds_products:
            cos, sin = cos.float(), sin.float()
        if self.interleaved:
            found = torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
        else:
            found = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return found[0][:, None], found[1][:, None]

    def __call__(self, x: Tensor, own: Tensor, other: Tensor) -> Tensor:
        """Rotates heads, positions x heads x head size, with the numbers of :meth:`factors`."""
        turned = x[..., : self.width]
        if self.interleaved:
            others = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            others = turned.roll(self.width // 2, -1)
        if not self.rounds_products:
            turned, others = turned.float(), others.float()
        found = (turned * own + others * other).to(x.dtype)
        return found if self.width == x.shape[-1] else torch.cat((found, x[..., self.width :]), -1)


@dataclass(frozen=True)
class Latent:
    """What is special about attention whose keys and values are products of one vector for each token.

    The cache keeps that vector, the latent, and a rotated key that all heads share. A head's weights of its
    keys multiply its query instead, and those of its values the weighted sum of latents.
    """

    query: Product | None
    """What comes before the product of queries, if they have a latent too, and is normalized."""
    query_norm: Norm | None
    norm: Norm | None
    """Of the latent."""
    module: nn.Module
    """The linear module that makes keys and values of the latent, head after head."""
    rows: int
    """Its rows for each head."""
    first_key: int
    first_value: int
    """The first of a head's rows that make its key, and its value."""
    key_size: int
    """The elements of a key, and of a query, that are not rotated; they come before those that are."""
    value_size: int
    """Of a head."""
    splits_pairs: bool
    """Whether the first elements of all rotated pairs come before the second ones afterwards."""

    def weights(self) -> tuple[Tensor, Tensor]:
        """Returns heads x latent x key size, and heads x value size x latent; they may share memory."""
        by_head = self.module.weight.detach().unflatten(0, (-1, self.rows))  # type: ignore[operator]
        keys = by_head.narrow(1, self.first_key, self.key_size).transpose(1, 2)
        return keys, by_head.narrow(1, self.first_value, self.value_size)


@dataclass(frozen=True)
class Attention:
    """Attention of one layer, from its normalized input to its output projection.

    With a latent, ``key`` is the key that all heads share, and ``value`` the latent. There is one key head,
    whose key is the latent and that key, and whose value is the latent.
    """

    query: Product
    key: Product
    value: Product
    query_norm: Norm | None
    key_norm: Norm | None
    value_norm: Norm | None
    """Of each head."""
    norm_is_per_head: bool
    rotary: Rotary | None
    rotary_first: bool
    """Whether queries and keys are rotated before they are normalized."""
    query_factors: int | None
    """The index in ``Decoder.factors`` of the numbers that rotated queries are multiplied by."""
    heads: int
    key_heads: int
    head_size: int
    value_size: int
    scale: float
    window: int | None
    """The most keys a query sees, its own included; ``None``: all."""
    softcap: float | None
    sinks: Tensor | None
    output: nn.Module
    latent: Latent | None
    shares: int | None
    """The layer whose keys and values it uses, without products of its own for them; ``None``: its own."""
    gate: Product | None
    """What the sigmoid of is multiplied by the mixed values, before the output projection."""

    @property
    def products(self) -> tuple[Product, ...]:
        """Those that have the layer's input, unless there is a latent."""
        return (self.query,) if self.shares is not None else (self.query, self.key, self.value)


class _Convolved:
    """What a mixer with a causal convolution over tokens keeps of them."""

    weight: Tensor

    @property
    def width(self) -> int:
        """The number of tokens that a result of the convolution is made of."""
        return int(self.weight.shape[-1])

    @property
    def window(self) -> int:
        """The number of tokens whose inputs are kept: transformers' cache has one more than are needed."""
        return self.width + 1


@dataclass(frozen=True)
class Convolution(_Convolved):
    """A gated causal convolution of each channel over tokens, of one layer.

    A token's inputs are ``first(x) * second(x)``, for each channel. The layer's result is
    ``output(gate(x) * y)``, where ``y`` is the sum of the inputs of the last tokens, each times its weight.
    Padding has zeros in the place of ``x``.

    The cache keeps inputs as the keys of one head with a window, without values.
    """

    first: Product
    second: Product
    gate: Product
    weight: Tensor
    """Channels x 1 x tokens; the last weight is that of the token itself."""
    bias: Tensor | None
    output: nn.Module

    @property
    def channels(self) -> int:
        """The numbers of a token that are kept."""
        return self.first.width


@dataclass(frozen=True)
class DeltaRule(_Convolved):
    """The gated delta rule of one layer: each head has a state, keys x values, that every token changes.

    ``given(x)`` are the queries and keys of all key heads, then the values of all heads. Each of these
    channels passes a causal convolution over tokens and an activation. Queries and keys are then divided by
    their length; several heads may share a key head. With ``k``, ``v`` and ``q`` of a head,
    ``b = strength_factor * sigmoid(strength(x))`` and ``a = -exp(rate) * softplus(decay(x) + decay_bias)``::

        state = exp(a) * state
        state = state + k (b * (v - k state))
        result = scale * q state

    The layer's result is ``output(norm(result) * activation(gate(x)))``, with a norm of each head.

    The cache keeps the inputs of the convolution as :class:`Convolution` says, and the states in float32.
    """

    given: Product
    weight: Tensor
    """Channels x 1 x tokens; the last weight is that of the token itself."""
    bias: Tensor | None
    activation: str
    heads: int
    key_heads: int
    key_size: int
    value_size: int
    eps: float
    """What is added to the squared length of queries and keys."""
    scale: float
    strength: Product
    strength_factor: float
    """A power of two, so that nothing is rounded."""
    decay: Product
    decay_bias: Tensor
    rate: Tensor
    norm: Norm
    gate: Product
    gate_activation: str
    output: nn.Module

    @property
    def channels(self) -> int:
        """The numbers of a token that the convolution takes."""
        return self.given.width


Mixer = Attention | Convolution | DeltaRule
"""What mixes the tokens of a text in a layer."""


@dataclass(frozen=True)
class Mlp:
    """An MLP: ``down(activation(gate) * up)``, or ``down(activation(up))``."""

    gate: Product | None
    up: Product
    activation: str
    down: nn.Module


@dataclass(frozen=True)
class Matrix:
    """A weight of a router that is in no linear module of its own."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Operation:
    """An operation on a token's numbers, of which each expert, or each chosen one, has one."""

    kind: str
    """One of ``OPERATIONS``."""
    value: float = 0.0
    """What ``normalize`` adds to the sum that it divides by, the least sum that ``normalize_at_least``
    divides by, the factor of ``scale``, or the cap."""

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the changed numbers (... x experts) in float32; ``dtype`` is that of ``round``."""
        return OPERATIONS[self.kind](x, self.value, dtype)


@dataclass(frozen=True)
class Groups:
    """A router's choice of some groups of experts, among whose experts it then chooses."""

    count: int
    used: int
    best: int
    """The number of a group's largest scores whose sum is its own score."""
    others: float
    """The score of the experts of the other groups."""

    def scores(self, choice: Tensor) -> Tensor:
        """Returns the groups' scores, tokens x groups, of those of experts."""
        by_group = choice.unflatten(-1, (self.count, -1))
        found: Tensor = by_group.topk(self.best, -1).values.sum(-1)
        return found


@dataclass(frozen=True)
class Router:
    """Chooses a token's experts, and says how much each counts."""

    logits: Matrix | Part
    rounds_logits: bool
    """Whether the product is rounded to the model's dtype; else it is computed in float32."""
    scores: tuple[Operation, ...]
    """What makes scores of the logits."""
    choice_bias: Tensor | None
    """What is added to the scores for the choice, but not for the weights."""
    groups: Groups | None
    used: int
    """The number of experts of a token: those with the largest scores."""
    weights: tuple[Operation, ...]
    """What makes weights of the chosen experts' scores."""
    factors: Tensor | None
    """What the weights are multiplied by at the end: one number for each of all experts."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights and the numbers of the experts of each token, tokens x used."""
        scores = self.scores_of(self.logits_of(x), x.dtype)
        chosen = self.choose(self.biased(scores))
        return self.weigh(scores, chosen, x.dtype), chosen

    def logits_of(self, x: Tensor) -> Tensor:
        """Returns the logits in float32, tokens x experts."""
        if isinstance(self.logits, Part):
            logits: Tensor = self.logits.module(x).narrow(-1, self.logits.first, self.logits.count)
        else:
            weight, bias = self.logits.weight, self.logits.bias
            if not self.rounds_logits:
                x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
            logits = nn.functional.linear(x, weight, bias)
        return logits.float()

    def scores_of(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the scores of logits; ``dtype`` is the model's."""
        for operation in self.scores:
            logits = operation(logits, dtype)
        return logits

    def biased(self, scores: Tensor) -> Tensor:
        """Returns the scores by which experts are chosen."""
        return scores if self.choice_bias is None else scores + self.choice_bias.float()

    def choose(self, choice: Tensor, group_scores: Tensor | None = None) -> Tensor:
        """Returns the numbers of the experts of each token, tokens x used.

        Args:
            choice: the scores of :meth:`biased`.
            group_scores: those of groups; ``None``: those that ``choice`` makes.
        """
        if self.groups is not None:
            by_group = choice.unflatten(-1, (self.groups.count, -1))
            scores = self.groups.scores(choice) if group_scores is None else group_scores
            best = scores.topk(self.groups.used, -1).indices
            is_used = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
            choice = by_group.masked_fill(~is_used[..., None], self.groups.others).flatten(-2)
        return choice.topk(self.used, -1).indices

    def weigh(self, scores: Tensor, chosen: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the weights of the chosen experts, tokens x used."""
        weights = scores.gather(-1, chosen)
        for operation in self.weights:
            weights = operation(weights, dtype)
        return weights if self.factors is None else weights * self.factors.float()[chosen]


@dataclass(frozen=True)
class Stack:
    """The weights of all experts of a layer for one product: experts x outputs x inputs."""

    module: nn.Module
    name: str
    """The attribute of the module that is the tensor, or is packed instead of it."""
    is_turned: bool
    """Whether the tensor is experts x inputs x outputs."""
    bias: Tensor | None
    """Experts x outputs."""


@dataclass(frozen=True)
class Gating:
    """What an expert computes between its two products."""

    activation: str
    is_gated: bool
    steepness: float
    """The activation is ``x * sigmoid(steepness * x)`` if this is not 1."""
    gate_limit: float | None
    """The largest value of a gate."""
    up_limit: float | None
    """The largest magnitude of what is multiplied by a gate."""
    adds: float
    """What is added to it before."""

    def __call__(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """Returns the input of the second product."""
        if gate is None:
            return ACTIVATIONS[self.activation](up)
        if self.gate_limit is not None:
            gate = gate.clamp(max=self.gate_limit)
        if self.up_limit is not None:
            up = up.clamp(-self.up_limit, self.up_limit)
        if self.steepness != 1.0:
            gate = gate * torch.sigmoid(gate * self.steepness)
        else:
            gate = ACTIVATIONS[self.activation](gate)
        return gate * (up if self.adds == 0.0 else up + self.adds)


@dataclass(frozen=True)
class ExpertNorms:
    """Norms of a layer whose router, experts and shared MLP have inputs and results of their own.

    The router and the experts normalize what the layer adds the experts' result to, as the shared MLP does.
    """

    router: Norm
    router_multiplier: float
    """What the router's normalized input is multiplied by."""
    inner: Norm
    """Of the experts' input."""
    result: Norm
    """Of the experts' sum."""
    shared_result: Norm


@dataclass(frozen=True)
class Experts:
    """Experts of which each token uses some, and an MLP that all tokens share."""

    router: Router
    inner: Stack
    """The first products: gates and ups of each expert, one after the other or in turns."""
    interleaved: bool
    """Whether gates and ups take turns; else the gates come first."""
    gating: Gating
    down: Stack
    rounds_weighted: bool
    """Whether a weighted result is rounded to the model's dtype before the results are summed."""
    shared: Mlp | None
    shared_gate: Product | None
    """One column, whose sigmoid the shared MLP's result is multiplied by."""
    norms: ExpertNorms | None
    """``None``: router and experts have the shared MLP's input, and results are added as they are."""


@dataclass(frozen=True)
class TokenInputs:
    """Numbers that a token has for each layer, beside its row of the embedding: layers x size.

    They are ``multiplier * (norm(product_multiplier * product(x)) + table_multiplier * row)``, where ``x`` is
    the first layer's input.
    """

    table: nn.Module
    table_multiplier: float
    product: Product
    product_multiplier: float
    norm: Norm | None
    """Of the numbers of one layer."""
    size: int
    multiplier: float


@dataclass(frozen=True)
class TokenInput:
    """What a layer adds to its result: ``norm(output(activation(gate(x)) * numbers))``."""

    index: int
    """Which of the token's numbers it uses."""
    gate: Product
    activation: str
    output: nn.Module
    norm: Norm | None


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    mixer_norm: Norm | None
    mixer: Mixer
    mixer_post_norm: Norm | None
    mixer_multiplier: float
    mlp_norm: Norm | None
    mlp: Mlp | Experts
    mlp_post_norm: Norm | None
    mlp_multiplier: float
    parallel: bool
    """Whether the MLP starts from the layer's input, as the mixer does; else from the mixer's result."""
    adds_branches_first: bool
    """In a parallel layer: whether the branches are added to each other, then to the layer's input."""
    mlp_shares_norm: bool
    """In a parallel layer: whether the MLP has the mixer's normalized input."""
    token_input: TokenInput | None
    multiplier: float
    """What the layer's result is multiplied by at its end."""


@dataclass(frozen=True)
class SharedTable:
    """An embedding whose rows the ranks share."""

    own: range
    """The tokens whose rows this rank has."""
    tokens: int
    """The number of tokens of all ranks."""


@dataclass(frozen=True)
class Share:
    """One rank's part of a split model."""

    ranks: Ranks
    summed: frozenset[nn.Module]
    """Linear modules whose outputs are summed over the ranks."""
    table: SharedTable | None
    """The tokens' embedding; ``None``: each rank has all of it."""
    head_widths: tuple[int, ...] | None
    """The number of columns of the output head on each rank; ``None``: each rank has all."""
    rows: Mapping[Tensor, SharedRow]
    """The rows that ranks share, by this rank's part of their normalization's weight."""


@dataclass(frozen=True)
class Decoder:
    """A whole decoder, or one rank's part of it."""

    replaced_tokens: tuple[tuple[int, ...], int] | None
    """Tokens that count as another one, such as those in whose place an image comes, and that one."""
    embedding: nn.Module
    embedding_multiplier: float
    embedding_norm: Norm | None
    positions: Tensor | None
    """The weight of a learned position embedding."""
    position_offset: int
    tables: tuple[RotaryTable, ...]
    factors: tuple[PositionFunction, ...]
    """Functions that give one number for each position, which queries are multiplied by."""
    token_inputs: TokenInputs | None
    layers: tuple[Layer, ...]
    norm: Norm | None
    head_multiplier: float
    """What the head's input is multiplied by."""
    head: nn.Module
    logit_multiplier: float
    logit_softcap: float | None
    dtype: torch.dtype
    hidden: int
    vocabulary: int
    share: Share | None
    """This rank's part of the decoder; ``None``: the decoder is whole."""
    limit: int | None
    """The most tokens of a text for which the model computes this; ``None``: any number."""
    constants: tuple[Tensor, ...]
    """The model's tensors of one element, whose values stand in the description as numbers."""
    describes_prompts: bool
    """Whether the model computes prompts in this way too; else the model itself reads them."""

    def tokens(self, tokens: Tensor) -> Tensor:
        """Returns the tokens whose rows of the embedding are used."""
        if self.replaced_tokens is None:
            return tokens
        replaced, by = self.replaced_tokens
        for token in replaced:
            tokens = tokens.masked_fill(tokens == token, by)
        return tokens

    @property
    def own_mixers(self) -> list[Mixer]:
        """The mixers of the layers with a cache of their own, which come first."""
        return [layer.mixer for layer in self.layers if shared_layer(layer.mixer) is None]


def shared_layer(mixer: Mixer) -> int | None:
    """Returns the layer whose keys and values a layer uses; ``None``: its own."""
    return mixer.shares if isinstance(mixer, Attention) else None


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
    "relu2": lambda x: nn.functional.relu(x).square(),
}
"""The activations that a description can express."""

OPERATIONS: dict[str, Callable[[Tensor, float, torch.dtype], Tensor]] = {
    "softmax": lambda x, _, dtype: x.softmax(-1),
    "sigmoid": lambda x, _, dtype: x.sigmoid(),
    "normalize": lambda x, small, dtype: x / (x.sum(-1, keepdim=True) + small),
    "scale": lambda x, factor, dtype: x * factor,
    "soft_cap": lambda x, cap, dtype: torch.tanh(x / cap) * cap,
    "round": lambda x, _, dtype: x.to(dtype).float(),
    "normalize_at_least": lambda x, least, dtype: x / x.sum(-1, keepdim=True).clamp(min=least),
}
"""The operations of a router that a description can express."""
