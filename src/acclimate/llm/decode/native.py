"""The native step: passes a description to native code as numbers and addresses; one call computes a token.

Weights whose rows are contiguous are used in place; small tensors (norms, biases) are copied to float32. The
native code that reads the description is ``llm/kernels/csrc/decode_program.h``.
"""

from __future__ import annotations

import contextlib
import math
import struct
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.llm.decode.cache import StepCache
from acclimate.llm.decode.description import (
    ACTIVATIONS,
    OPERATIONS,
    Attention,
    Convolution,
    Decoder,
    DeltaRule,
    Experts,
    Gating,
    Latent,
    Layer,
    Matrix,
    Mlp,
    Norm,
    Operation,
    Part,
    PositionFunction,
    Product,
    Router,
    Stack,
    TokenInput,
    TokenInputs,
    shared_layer,
)
from acclimate.llm.decode.finite_logits import check_logits
from acclimate.llm.decode.modules import bias_of, packed_stacks, packed_weight, rows_of
from acclimate.llm.decode.share import Exchange, likeliest_token, whole_logits
from acclimate.llm.decode.trace import Trace
from acclimate.llm.deferred_sigint import interrupts_deferred
from acclimate.llm.kernels.builder import prefills
from acclimate.llm.kernels.torch_threads import kernel_threads
from acclimate.selection import get_accelerator

# As linear.h numbers them. ACTIVATIONS and OPERATIONS are in the order of decode_math.h and decode_program.h.
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NO_PRODUCT = Product(())
_READ_TOGETHER = 512
_PLACES_TOGETHER = 1024
"""The positions whose angles are computed together; intermediate results take several times the memory."""


class NativeDecoder:
    """A description that native code has read.

    Args:
        decoder: the description of a model on the CPU.

    Attributes:
        prefills: whether it does the prefill too: one call then takes many tokens of a sequence.

    Raises:
        RuntimeError: native code cannot run it.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.batcher: Any = None  # the texts that take steps together (batching.py)
        share = decoder.share
        self.exchange = None if share is None else Exchange(share)
        writer = _ProgramWriter(decoder, 0 if self.exchange is None else self.exchange.address)
        writer.decoder(decoder)
        self._kept, self._copies = writer.kept, writer.copies
        program = torch.tensor(writer.numbers, dtype=torch.int64)
        self.number = int(torch.ops.acclimate.decode_start(program))
        self.prefills = decoder.describes_prompts and prefills(self.number)
        weakref.finalize(self, torch.ops.acclimate.decode_end, self.number)

    def copy_small_weights(self) -> None:
        """Copies what native code does not read in place: norms, biases, and weights stored by column."""
        with torch.no_grad():
            for copy, weight in self._copies:
                copy.copy_(weight())


class NativeStep:
    """One call of native code for each token.

    Args:
        native: the decoder.
        cache: the earlier tokens' keys, and their values by column.
        starts: the position of each sequence's first token.
        trace: what layers get and leave in a proof; ``None``: nothing.
    """

    def __init__(
        self, native: NativeDecoder, cache: StepCache, starts: Tensor, trace: Trace | None = None
    ) -> None:
        self._native, self.cache, self._trace = native, cache, trace
        self.starts = starts.long().contiguous()
        self._threads = kernel_threads()
        self._no_logits = torch.empty(0, dtype=torch.float32)
        self._no_best = torch.empty(0, dtype=torch.int64)
        native.copy_small_weights()  # they may have changed since the last text
        self._places = 0
        self._read_cache()

    def __call__(self, tokens: Tensor) -> Tensor:
        """Returns batch x vocabulary logits in float32."""
        decoder = self._native.decoder
        own = torch.empty((len(tokens), _head_width(decoder)), dtype=torch.float32)
        best = torch.empty(len(tokens), dtype=torch.int64)
        largest = torch.empty(len(tokens), dtype=torch.float32)
        self._run(tokens, own, best, largest)
        logits = whole_logits(decoder.share, own)
        # All ranks check the same numbers, so that the error is raised on all or on none.
        check_logits(largest if logits is own else logits.amax(-1), decoder.dtype)
        return logits

    def likeliest(self, tokens: Tensor) -> Tensor:
        """Returns the token with the largest logit, for each sequence."""
        best = torch.empty(len(tokens), dtype=torch.int64)
        largest = torch.empty(len(tokens), dtype=torch.float32)
        self._run(tokens, self._no_logits, best, largest)
        share = self._native.decoder.share
        if share is not None and share.head_widths is not None:
            best, largest = likeliest_token(share.ranks, share.head_widths, largest, best)
        check_logits(largest, self._native.decoder.dtype)
        return best

    def read(
        self,
        prompt: Tensor,
        *,
        likeliest: bool,
        turn: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> Tensor:
        """Reads the tokens of a prompt, batch x length, in parts.

        Args:
            prompt: the tokens.
            likeliest: what to return.
            turn: a context in which a part is read.

        Returns:
            For the last token of each sequence, the token with the largest logit or the logits.
        """
        batch, length = prompt.shape
        # The rows of a trace are those of a whole prompt.
        together = max(_READ_TOGETHER // batch, 1) if self._trace is None else length
        # Python handles signals between parts, others take steps, and little memory is needed.
        last = (length - 1) // together * together
        for first in range(0, last, together):
            part = prompt[:, first : first + together]
            with turn():
                self._run(part, self._no_logits, self._no_best, self._no_logits)
        rest = prompt[:, last:]
        with turn():
            return self.likeliest(rest) if likeliest else self(rest)

    def _run(self, tokens: Tensor, logits: Tensor, best: Tensor, largest: Tensor) -> None:
        cache, tokens = self.cache, self._native.decoder.tokens(tokens)
        length = cache.length + tokens.numel() // len(tokens)
        cache.reserve(length)
        if self._revision != cache.revision:
            self._read_cache()
        self._addresses[0] = cache.begin_step()
        exchange = self._native.exchange
        # Python could handle SIGINT when native code calls Exchange, before the first line of its function,
        # and drop the exception there: the step would continue without this rank's sum. So it is deferred.
        with interrupts_deferred() if exchange is not None else contextlib.nullcontext():
            has_rows = torch.ops.acclimate.decode_step(
                self._native.number, self._addresses, tokens.long().contiguous(), self.starts, cache.length,
                logits, best, largest, self._threads,
            )  # fmt: skip
            if exchange is not None:
                exchange.check()
        if not has_rows:
            raise IndexError("index out of range in self")  # torch's message for an embedding
        cache.end_step(length - cache.length)

    def _read_cache(self) -> None:
        """Reads the addresses of the cache, and computes the angles of its positions."""
        cache = self.cache
        if self._places < cache.capacity:
            self._compute_angles(cache.capacity)
        layers = self._native.decoder.layers
        numbers = [0, self._places, len(self._tables), len(self._factors), len(layers)]
        for cos, sin in self._tables:
            numbers += [cos.data_ptr(), sin.data_ptr()]
        numbers += [factors.data_ptr() for factors in self._factors]
        exponents = cache.exponents or ([None] * len(cache.keys),) * 2
        held = list(zip(cache.firsts, cache.keys, cache.values, *exponents, strict=True))
        for index, layer in enumerate(layers):
            shared = shared_layer(layer.mixer)
            first, *tensors = held[index if shared is None else shared]
            numbers += [tensors[0].shape[2], first]
            numbers += [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            copies = cache.states.get(index)
            numbers += [0, 0] if copies is None else [copy.data_ptr() for copy in copies]
            numbers += self._traced(index)
        numbers += self._traced(len(layers))
        self._addresses = torch.tensor(numbers, dtype=torch.int64)
        self._revision = cache.revision

    def _traced(self, index: int) -> list[int]:
        return [0, 0, 0, 0, 0] if self._trace is None else self._trace.addresses(index)

    def _compute_angles(self, count: int) -> None:
        """Computes what depends on positions, for so many of them."""
        decoder, places = self._native.decoder, torch.arange(count).split(_PLACES_TOGETHER)

        def of_all(function: PositionFunction) -> Tensor:
            return torch.cat([function(some).float() for some in places])

        with torch.no_grad():
            self._tables = [(of_all(table.cos), of_all(table.sin)) for table in decoder.tables]
            self._factors = [of_all(function) for function in decoder.factors]
        self._places = count


def native_decoder(decoder: Decoder, device: torch.device) -> NativeDecoder | None:
    """Returns the native form of a description; ``None`` if there is no native step for it here."""
    if device.type != "cpu" or decoder.dtype not in _DTYPES:
        return None
    builder = get_accelerator().create_op_builder("InferenceBuilder")
    if builder is None:
        return None
    builder.load()
    name = "acclimate::decode_step"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeExplicitAutograd"):
        return None
    return NativeDecoder(decoder)


def _head_width(decoder: Decoder) -> int:
    """Returns the number of this rank's columns of the output head."""
    share = decoder.share
    if share is None or share.head_widths is None:
        return decoder.vocabulary
    return share.head_widths[share.ranks.rank]


class _ProgramWriter:
    """Writes a description in the order of ``decode_program.h``."""

    def __init__(self, decoder: Decoder, exchange: int) -> None:
        self.numbers: list[int] = []
        self.kept: list[Any] = []
        self.copies: list[tuple[Tensor, Callable[[], Tensor]]] = []
        self._hidden, self._exchange = decoder.hidden, exchange
        self._summed = frozenset() if decoder.share is None else decoder.share.summed

    def decoder(self, decoder: Decoder) -> None:
        self._number(_DTYPES[decoder.dtype], decoder.hidden, len(decoder.tables), len(decoder.factors))
        packed = packed_weight(decoder.embedding)
        self._weight(decoder.embedding.weight if packed is None else packed)
        self._real(decoder.embedding_multiplier)
        self._norm(decoder.embedding_norm)
        table = None if decoder.share is None else decoder.share.table
        rows = packed.shape[0] if packed is not None else len(decoder.embedding.weight)  # type: ignore[arg-type]
        self._number(self._exchange, table is not None)
        self._number(*(0, rows) if table is None else (table.own.start, table.tokens))
        if decoder.positions is None:
            self._number(0, 0, 0, 0, 0, 0)
        else:
            self._weight(decoder.positions)
        self._number(decoder.position_offset, decoder.token_inputs is not None)
        if decoder.token_inputs is not None:
            self._token_inputs(decoder.token_inputs)
        self._number(len(decoder.layers))
        for layer in decoder.layers:
            self._layer(layer)
        self._norm(decoder.norm)
        self._real(decoder.head_multiplier)
        self._module(decoder.head, _head_width(decoder))
        self._real(decoder.logit_multiplier, decoder.logit_softcap or 0.0)

    def _number(self, *values: int) -> None:
        self.numbers += [int(value) for value in values]

    def _real(self, *values: float) -> None:
        self.numbers += [struct.unpack("<q", struct.pack("<d", value))[0] for value in values]

    def _tensor(self, tensor: Tensor | None, change: Callable[[Tensor], Tensor] = Tensor.detach) -> None:
        """Writes the address of a copy in float32, which ``copy_small_weights`` fills; 0: none.

        Args:
            tensor: the model's own tensor.
            change: what is copied of it.
        """
        if tensor is None:
            return self._number(0)
        own = tensor.detach()
        self.copies.append((change(own).float().contiguous().clone(), lambda: change(own)))
        return self._number(self.copies[-1][0].data_ptr())

    def _weight(self, weight: Any) -> None:
        """Writes a tensor or a packed weight."""
        self.kept.append(weight)
        is_dense = isinstance(weight, Tensor)
        self._number(*(0, _DTYPES[weight.dtype]) if is_dense else (weight.number, 0))
        data = weight if is_dense else weight.data
        self._number(*weight.shape, data.data_ptr(), data.stride(0) * data.element_size())

    def _by_rows(self, weight: Tensor) -> Tensor:
        """Returns weights with contiguous rows: themselves, or a copy that ``copy_small_weights`` fills."""
        if weight.stride(-1) == 1 and weight.stride(-2) >= weight.shape[-1]:
            return weight
        # The parameter keeps its layout: safetensors saves only contiguous tensors, for example.
        self.copies.append((torch.empty(weight.shape, dtype=weight.dtype), lambda: weight))
        return self.copies[-1][0]

    def _product(self, *products: Product) -> None:
        parts = [part for product in products for part in product.parts]
        self._number(len(parts))
        for part in parts:
            packed = packed_weight(part.module)
            self._weight(self._by_rows(rows_of(part.module)) if packed is None else packed)
            self._number(part.first, part.count)
            self._tensor(bias_of(part.module))

    def _module(self, module: nn.Module, width: int) -> None:
        self._product(Product((Part(module, 0, width),)))

    def _norm(self, norm: Norm | None) -> None:
        if norm is None:
            return self._number(0)
        weight = norm.weight

        def factor(own: Tensor) -> Tensor:
            own = own if norm.rounds_first else own.float()
            return own + 1 if norm.adds_one else own

        self._number(1, norm.kind == "layer", norm.rounds_first)
        self._real(norm.eps)
        self._tensor(weight, factor)
        self._tensor(norm.bias)
        self._number(weight.shape[0] if weight is not None and weight.dim() == 2 else 1)
        shared = norm.shared
        return self._number(*((0, True) if shared is None else (shared.columns, shared.counts)))

    def _attention(self, attention: Attention) -> None:
        latent = attention.latent
        if latent is None:
            gate = _NO_PRODUCT if attention.gate is None else attention.gate
            self._product(attention.query, attention.key, attention.value, gate)
        else:
            self._product(latent.query or attention.query, attention.value, attention.key)
        self._norm(attention.query_norm)
        self._norm(attention.key_norm)
        self._norm(attention.value_norm)
        self._number(attention.norm_is_per_head, attention.rotary_first)
        rotary = attention.rotary
        if rotary is None:
            self._number(-1, 0, 0, 0)
        else:
            self._number(rotary.table, rotary.width // 2, rotary.interleaved, rotary.rounds_products)
        self._number(-1 if attention.query_factors is None else attention.query_factors)
        self._number(attention.heads, attention.key_heads, attention.head_size, attention.value_size)
        self._real(attention.scale)
        self._number(attention.window or 0)
        self._real(attention.softcap or 0.0)
        self._tensor(attention.sinks)
        self._module(attention.output, self._hidden)
        self._number(attention.output in self._summed)
        self._number(attention.shares is not None, attention.gate is not None, latent is not None)
        if latent is not None:
            self._latent(attention, latent)

    def _convolution(self, convolution: Convolution) -> None:
        self._product(convolution.first, convolution.second, convolution.gate)
        self._taps(convolution)
        self._module(convolution.output, self._hidden)
        self._number(convolution.output in self._summed)

    def _taps(self, mixer: Convolution | DeltaRule) -> None:
        self._number(mixer.channels, mixer.width)
        self._tensor(mixer.weight, lambda own: own[:, 0].t())
        self._tensor(mixer.bias)

    def _delta_rule(self, rule: DeltaRule) -> None:
        self._product(rule.given, rule.gate, rule.strength, rule.decay)
        self._taps(rule)
        self._number(list(ACTIVATIONS).index(rule.activation))
        self._number(rule.heads, rule.key_heads, rule.key_size, rule.value_size)
        self._real(rule.eps, rule.scale, rule.strength_factor)
        self._tensor(rule.decay_bias)
        self._tensor(rule.rate)
        self._norm(rule.norm)
        self._number(list(ACTIVATIONS).index(rule.gate_activation))
        self._module(rule.output, self._hidden)
        self._number(rule.output in self._summed)

    def _latent(self, attention: Attention, latent: Latent) -> None:
        self._product(_NO_PRODUCT if latent.query is None else attention.query)
        self._norm(latent.query_norm)
        self._norm(latent.norm)
        is_packed = packed_weight(latent.module) is not None
        self._heads(lambda: latent.weights()[0], is_packed)
        self._heads(lambda: latent.weights()[1], is_packed)
        self._number(latent.key_size, attention.key.width, latent.splits_pairs)

    def _heads(self, weights: Callable[[], Tensor], is_packed: bool) -> None:
        """Writes a stack of each head's rows of a weight, which are copied if they are not contiguous."""
        own = weights()
        if is_packed:  # it has no turned form, and heads may begin within a group of rows
            own = own.clone(memory_format=torch.contiguous_format)
        elif own.stride(2) != 1:
            own = torch.empty(own.shape, dtype=own.dtype)
            self.copies.append((own, weights))
        self._number(len(own))
        self._weight(own[0])
        self._number(own.stride(0) * own.element_size(), 0)

    def _mlp(self, mlp: Mlp) -> None:
        self._number(list(ACTIVATIONS).index(mlp.activation), mlp.gate is not None)
        self._product(mlp.gate or _NO_PRODUCT)
        self._product(mlp.up)
        self._module(mlp.down, self._hidden)
        self._number(mlp.down in self._summed)

    def _matrix(self, matrix: Matrix) -> None:
        """Writes a product of one part."""
        self._number(1)
        self._weight(self._by_rows(matrix.weight.detach()))
        self._number(0, len(matrix.weight))
        self._tensor(matrix.bias)

    def _operations(self, operations: tuple[Operation, ...]) -> None:
        self._number(len(operations))
        for operation in operations:
            self._number(list(OPERATIONS).index(operation.kind))
            self._real(operation.value)

    def _router(self, router: Router) -> None:
        if isinstance(router.logits, Matrix):
            self._matrix(router.logits)
        else:
            self._product(Product((router.logits,)))
        self._number(router.rounds_logits)
        self._operations(router.scores)
        self._tensor(router.choice_bias)
        groups = router.groups
        self._number(*(0, 0, 0) if groups is None else (groups.count, groups.used, groups.best))
        self._real(0.0 if groups is None else groups.others)
        self._number(router.used)
        self._operations(router.weights)
        self._tensor(router.factors)

    def _stack(self, stack: Stack) -> None:
        packed = packed_stacks(stack.module).get(stack.name)
        if packed is not None:
            data, first = packed.data, packed.expert(0)
        else:
            tensor = getattr(stack.module, stack.name).detach()
            data = self._by_rows(tensor.transpose(1, 2) if stack.is_turned else tensor)
            first = data[0]
        self._number(len(data))
        self._weight(first)
        self._number(data.stride(0) * data.element_size())
        self._tensor(stack.bias)

    def _gating(self, gating: Gating) -> None:
        self._number(list(ACTIVATIONS).index(gating.activation), gating.is_gated)
        limits = (math.inf if limit is None else limit for limit in (gating.gate_limit, gating.up_limit))
        self._real(gating.steepness, *limits, gating.adds)

    def _experts(self, experts: Experts) -> None:
        self._router(experts.router)
        self._stack(experts.inner)
        self._number(experts.interleaved)
        self._gating(experts.gating)
        self._stack(experts.down)
        self._number(experts.rounds_weighted, experts.down.module in self._summed)
        norms = experts.norms
        self._number(norms is not None)
        if norms is not None:
            self._norm(norms.router)
            self._real(norms.router_multiplier)
            self._norm(norms.inner)
            self._norm(norms.result)
            self._norm(norms.shared_result)

    def _feed_forward(self, found: Mlp | Experts) -> None:
        experts = found if isinstance(found, Experts) else None
        mlp = found if isinstance(found, Mlp) else found.shared
        gate = None if experts is None else experts.shared_gate
        self._number(experts is not None)
        if experts is not None:
            self._experts(experts)
        self._number(mlp is not None)
        if mlp is not None:
            self._mlp(mlp)
        self._product(gate or _NO_PRODUCT)

    def _layer(self, layer: Layer) -> None:
        self._norm(layer.mixer_norm)
        writers: list[tuple[type, Any]] = [
            (Attention, self._attention), (Convolution, self._convolution), (DeltaRule, self._delta_rule),
        ]  # fmt: skip
        for kind, write in writers:
            self._number(isinstance(layer.mixer, kind))
            if isinstance(layer.mixer, kind):
                write(layer.mixer)
        self._norm(layer.mixer_post_norm)
        self._real(layer.mixer_multiplier)
        self._norm(layer.mlp_norm)
        self._feed_forward(layer.mlp)
        self._norm(layer.mlp_post_norm)
        self._real(layer.mlp_multiplier)
        self._number(layer.parallel, layer.adds_branches_first, layer.mlp_shares_norm)
        self._number(layer.token_input is not None)
        if layer.token_input is not None:
            self._token_input(layer.token_input)
        self._real(layer.multiplier)

    def _token_inputs(self, inputs: TokenInputs) -> None:
        packed = packed_weight(inputs.table)
        self._weight(inputs.table.weight if packed is None else packed)
        self._real(inputs.table_multiplier)
        self._product(inputs.product)
        self._real(inputs.product_multiplier)
        self._norm(inputs.norm)
        self._number(inputs.size)
        self._real(inputs.multiplier)

    def _token_input(self, added: TokenInput) -> None:
        self._number(added.index)
        self._product(added.gate)
        self._number(list(ACTIVATIONS).index(added.activation))
        self._module(added.output, self._hidden)
        self._norm(added.norm)
