"""One step of a described decoder as a graph of the accelerator, which starts all its kernels at once.

A step of one token is so little work that a device waits for the host's launches: a layer is dozens of
kernels of a few microseconds each. A graph has fixed tensors, so the place of the new token is one of them,
and attention reads all places for which the cache has room, with a mask.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from acclimate.accelerator.recorded_graph import RecordedGraph
from acclimate.imports import ForkSafeLock
from acclimate.llm.decode.cache import StepCache
from acclimate.llm.decode.description import Attention, Decoder, Experts, Norm, Product, Stack
from acclimate.llm.decode.finite_logits import check_logits
from acclimate.llm.decode.modules import packed_stacks
from acclimate.llm.decode.plain import Angles, PlainStep, gated_values, mixed_values
from acclimate.llm.decode.trace import Trace
from acclimate.llm.kernels.formats import DENSE_DTYPES
from acclimate.selection import get_accelerator

_capturing = ForkSafeLock()


@functools.cache
def _kernels(name: str, device_type: str, dtype: torch.dtype) -> ModuleType | None:
    """Returns a module of kernels in Triton, if Triton works for a device and gives torch's numbers."""
    accelerator = get_accelerator()
    if dtype not in DENSE_DTYPES or accelerator.device_type != device_type:
        return None
    if not accelerator.is_triton_supported():
        return None
    module = importlib.import_module(f"acclimate.llm.{name}")
    return module if module.is_right(device_type, dtype) else None


def can_capture(decoder: Decoder, devices: set[torch.device]) -> bool:
    """Whether the steps of a decoder can be a graph.

    A graph is of one device, and ranks wait for each other in a step, which cannot be captured.

    Args:
        decoder: the description.
        devices: where the model's tensors are.
    """
    accelerator = get_accelerator()
    if decoder.share is not None or len(devices) != 1 or not accelerator.supports_graphs:
        return False
    if devices.pop().type != accelerator.device_type:
        return False
    return not isinstance(accelerator.create_graph(), RecordedGraph)


class _Found(NamedTuple):
    """What a step computes, in tensors that the next replay overwrites."""

    logits: Tensor
    likeliest: Tensor
    """The token with the largest logit, for each sequence."""
    largest: Tensor
    """That logit; NaN if any is NaN."""


class GraphStep(PlainStep):
    """As :class:`PlainStep`; captured anew when the cache has moved.

    Args:
        decoder: the description.
        cache: the earlier tokens' keys and values; its layers keep all tokens.
        starts: the position of each sequence's first token; earlier positions are padding.
        trace: what layers get and leave in a proof; ``None``: nothing.
    """

    def __init__(
        self, decoder: Decoder, cache: StepCache, starts: Tensor, trace: Trace | None = None
    ) -> None:
        super().__init__(decoder, cache, starts, trace)
        self._tokens = torch.zeros_like(starts)
        self._place = torch.zeros_like(starts[0])
        self._copies = torch.tensor([0, 1], device=starts.device)
        """Which copy of recurrent states is read, and which is written."""
        self._shared: dict[Any, Any] = {}
        self._graph: Any = None
        self._revision: int | None = None
        """That of the cache when the graph was made."""
        self._found: _Found

    def __call__(self, tokens: Tensor) -> Tensor:
        """Returns batch x vocabulary logits in the model's dtype."""
        return self._run(tokens).logits.clone()

    def likeliest(self, tokens: Tensor) -> Tensor:
        """Returns the token with the largest logit, for each sequence."""
        return self._run(tokens).likeliest.clone()

    def _run(self, tokens: Tensor) -> _Found:
        cache, accelerator = self.cache, get_accelerator()
        cache.reserve(cache.length + 1)
        self._tokens.copy_(tokens)
        self._place.fill_(cache.length)
        read = cache.begin_step()
        if cache.states:
            self._copies[0], self._copies[1] = read, 1 - read
        with accelerator.device(self._place.device):  # of which a thread captures the work
            if self._revision != cache.revision:
                self._capture()
            accelerator.replay_graph(self._graph)
        cache.end_step(1)
        check_logits(self._found.largest, self._decoder.dtype)
        return self._found

    def _capture(self) -> None:
        """Makes the graph; the current device is that of the model.

        Raises:
            RuntimeError: the device cannot capture one of the model's operators.
        """
        accelerator = get_accelerator()
        with _capturing:
            self._graph = self._revision = None  # its memory can be used again
            self._compute()  # what only a first run does, such as choosing kernels, cannot be captured
            accelerator.synchronize()
            graph = accelerator.create_graph()
            with accelerator._capture_beside_other_threads(graph):
                self._found = self._compute()
        self._graph, self._revision = graph, self.cache.revision

    def _compute(self) -> _Found:
        self._shared.clear()
        logits = self._logits(self._tokens)
        # NaN is larger than any number, also in max.
        largest, likeliest = logits.float().max(-1)
        return _Found(logits, likeliest, largest)

    def _positions(self) -> Tensor:
        return self._place - self._starts

    def _pointwise(self, x: Tensor) -> ModuleType | None:
        if x.dim() != 2:
            return None
        return _kernels("decode.triton_pointwise", x.device.type, x.dtype)

    def _normed(self, norm: Norm | None, x: Tensor) -> Tensor:
        fused = None if norm is None else self._pointwise(x)
        if fused is None or not fused.can_normalize(norm, x):
            return super()._normed(norm, x)
        found: Tensor = fused.normalized(norm, x)[1]
        return found

    def _added(self, x: Tensor, added: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
        fused = None if norm is None else self._pointwise(x)
        if fused is None or x.dtype != added.dtype or added.stride(-1) != 1:
            return super()._added(x, added, norm)
        if not fused.can_normalize(norm, x):
            return super()._added(x, added, norm)
        found: tuple[Tensor, Tensor] = fused.normalized(norm, x, added)
        return found

    def _gated(self, activation: str, gate: Tensor, up: Tensor | None) -> Tensor:
        fused = self._pointwise(gate)
        if fused is None or not fused.can_gate(gate, up):
            return super()._gated(activation, gate, up)
        found: Tensor = fused.gated(activation, gate, up)
        return found

    def _multiplied(self, module: nn.Module, x: Tensor) -> Tensor:
        found = self._products(x, [module])
        return super()._multiplied(module, x) if found is None else found[0]

    def _computed(self, x: Tensor, *products: Product | None) -> dict[int, Tensor]:
        modules = {id(part.module): part.module for p in products if p is not None for part in p.parts}
        found = self._products(x, list(modules.values()))
        return {} if found is None else dict(zip(modules, found, strict=True))

    def _products(self, x: Tensor, modules: list[nn.Module]) -> list[Tensor] | None:
        """Returns what modules with one input give if one kernel computes it."""
        if x.dim() != 2:
            return None
        fused = _kernels("kernels.triton_products", x.device.type, x.dtype)
        if fused is None or not fused.can_multiply(x, modules):
            return None
        found: list[Tensor] = fused.products(x, modules)
        return found

    def _stored_heads(self, index: int, attention: Attention, x: Tensor, angles: Angles) -> Tensor:
        cache, fused = self.cache, self._pointwise(x)
        rotation = None if attention.rotary is None else angles.of(attention.rotary)
        factors = None
        if attention.query_factors is not None:
            function = self._decoder.factors[attention.query_factors]
            factors = self._known(("factors", attention.query_factors), lambda: function(self._positions()))
        has_one_factor = factors is None or factors.numel() == len(x)
        if fused is None or cache.dtype != x.dtype or not has_one_factor:
            return super()._stored_heads(index, attention, x, angles)
        if not fused.can_prepare(attention, x, rotation):
            return super()._stored_heads(index, attention, x, angles)
        memory = self._computed(x, *attention.products)
        query, stored, held, place = attention.query(x, memory), None, None, self._place
        if attention.shares is None:
            stored = attention.key(x, memory), attention.value(x, memory)
            held = cache.keys[index], cache.values[index]
            first = cache.firsts[index]
            place = self._known(("place", first), lambda: self._place - first if first else self._place)
        found: Tensor = fused.prepared_heads(attention, query, stored, rotation, factors, held, place)
        return found

    def _store(self, index: int, key: Tensor, value: Tensor) -> None:
        self.cache.put_at(index, self._place, key, value)

    def _state(self, index: int) -> Tensor:
        return self.cache.states[index].index_select(0, self._copies[:1])[0]

    def _store_state(self, index: int, state: Tensor) -> None:
        self.cache.states[index].index_copy_(0, self._copies[1:], state[None])

    def _last_inputs(self, index: int, count: int) -> Tensor:
        first, inputs = self.cache.firsts[index], self._all_held(index)[0][:, 0]
        places = self._place - torch.arange(count - 1, -1, -1, device=self._place.device)
        found = inputs.index_select(1, (places - first).clamp(min=0))
        return found.masked_fill((places < 0)[:, None], 0.0)

    def _mixed(self, index: int, attention: Attention, query: Tensor) -> Tensor:
        cache, first = self.cache, self.cache.firsts[index]
        fused = _kernels("kernels.triton_attention", query.device.type, query.dtype)
        if fused is not None and fused.can_mix(query, cache.keys[index], cache.values[index]):
            place, starts = self._known(first, lambda: (self._place - first, self._starts - first))
            return fused.mixed_values(  # type: ignore[no-any-return]
                query, cache.keys[index], cache.values[index], place, starts, scale=attention.scale,
                softcap=attention.softcap, window=attention.window, sinks=attention.sinks,
            )  # fmt: skip
        keys, values = self._all_held(index)
        seen = self._known(
            (attention.window, first, keys.shape[2]),
            lambda: self._visible(attention.window, first, keys.shape[2]),
        )
        # Not torch's fused attention: with a mask, that builds a program for each shape of the cache on some
        # GPUs, which takes up to a second.
        return mixed_values(attention, query, keys, values, seen)

    def _all_held(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns what a layer of the cache has at all places, also at those that no token has yet."""
        first = self.cache.firsts[index]
        return self.cache.held(index, first, first + self.cache.keys[index].shape[2])

    def _known(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Returns what several layers use, computed once for a step."""
        if key not in self._shared:
            self._shared[key] = compute()
        return self._shared[key]

    def _visible(self, window: int | None, first: int, count: int) -> Tensor:
        """Returns which of the tokens from a place on each query sees, batch x count."""
        places = torch.arange(first, first + count, device=self._place.device)
        seen = (places <= self._place) & (places >= self._starts[:, None])
        return seen if window is None else seen & (places > self._place - window)

    def _expert_sums(self, experts: Experts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        every, used = chosen.flatten(), chosen.shape[1]
        gated = gated_values(experts, _gathered(experts.inner, every, x.repeat_interleave(used, 0)))
        found = _gathered(experts.down, every, gated).float() * weights.reshape(-1, 1)
        found = found.to(x.dtype).float() if experts.rounds_weighted else found
        return found.view(*chosen.shape, -1).sum(1)


def _gathered(stack: Stack, chosen: Tensor, x: Tensor) -> Tensor:
    """Multiplies each row by the weight of its expert."""
    packed = packed_stacks(stack.module).get(stack.name)
    if packed is not None:
        found: Tensor = packed.linear(x, chosen)
        return found if stack.bias is None else found + stack.bias[chosen]
    weight = getattr(stack.module, stack.name).detach()[chosen]
    found = torch.bmm(x[:, None], weight if stack.is_turned else weight.transpose(1, 2))[:, 0]
    return found if stack.bias is None else found + stack.bias[chosen]
