"""A described decoder that can compute steps: in native code, as a device's graph, or in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from acclimate.llm.decode.cache import StepCache
from acclimate.llm.decode.description import Decoder
from acclimate.llm.decode.graph_step import GraphStep
from acclimate.llm.decode.native import NativeDecoder, NativeStep
from acclimate.llm.decode.plain import PlainStep
from acclimate.llm.decode.trace import Trace


class Step(Protocol):
    """Computes the logits that follow one more token of each sequence."""

    @property
    def cache(self) -> StepCache:
        """The keys and values of the tokens so far."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """Returns batch x vocabulary logits."""

    def likeliest(self, tokens: Tensor) -> Tensor:
        """Returns the token with the largest logit, for each sequence."""


@dataclass(frozen=True)
class LeanDecoder:
    """A description, and its native form if there is one."""

    decoder: Decoder
    native: NativeDecoder | None
    is_graph: bool = False
    """Whether steps are a graph of the accelerator."""

    def go_on(
        self,
        cache: Any,
        starts: Tensor,
        length: int,
        room: int,
        *,
        gives_back: bool = False,
        dtype: torch.dtype | None = None,
        trace: Trace | None = None,
    ) -> Step:
        """Returns a step that continues from transformers' cache.

        Args:
            cache: transformers' cache, which is copied.
            starts: the position of each sequence's first token; earlier positions are padding.
            length: the number of positions in the cache.
            room: the number of positions to allocate.
            gives_back: whether the cache is to get the keys and values of all further tokens.
            dtype: the ``dtype`` argument of :class:`StepCache`.
            trace: the ``trace`` argument of the step.
        """
        own = self._cache(starts, room, length, cache if gives_back else None, dtype)
        own.take(cache)
        if self.native is not None:
            return NativeStep(self.native, own, starts, trace)
        return (GraphStep if self.is_graph else PlainStep)(self.decoder, own, starts, trace)

    def begin(
        self,
        starts: Tensor,
        room: int,
        given: Any = None,
        *,
        gives_back: bool = False,
        dtype: torch.dtype | None = None,
        trace: Trace | None = None,
    ) -> NativeStep | None:
        """Returns a step that also does the prefill; ``None`` if the model does it faster.

        Args:
            starts: the position of each sequence's first token; earlier positions are padding.
            room: the number of positions to allocate.
            given: transformers' cache with the first tokens of the prompt, which is copied.
            gives_back: whether that cache is to get the keys and values of all further tokens.
            dtype: the ``dtype`` argument of :class:`StepCache`.
            trace: the ``trace`` argument of the step.
        """
        if self.native is None or not self.native.prefills:
            return None
        length = 0 if given is None else given.get_seq_length()
        own = self._cache(starts, room, length, given if gives_back else None, dtype)
        own.take(given)
        return NativeStep(self.native, own, starts, trace)

    def _cache(self, starts: Tensor, room: int, length: int, to: Any, dtype: torch.dtype | None) -> StepCache:
        """Returns a cache that keeps what transformers' cache ``to`` must get at the end."""
        layers = set(range(len(self.decoder.own_mixers)))
        kept: set[int] = set()
        if self.is_graph:  # whose tensors stay where they are
            kept = layers
        elif to is not None:
            # Without layers yet, it makes those that keep all tokens.
            kept = layers - {i for i, layer in enumerate(to.layers) if _drops_tokens(layer)}
        return StepCache(
            self.decoder, len(starts), starts.device, room, length=length,
            values_by_column=self.native is not None, kept=kept, dtype=dtype,
        )  # fmt: skip


def _drops_tokens(layer: Any) -> bool:
    """Whether a layer of transformers' cache drops tokens that its window has passed, or inputs of a
    convolution."""
    drops = getattr(layer, "is_sliding", False) or hasattr(layer, "conv_states")
    return bool(drops) and not getattr(layer, "record_past", False)
