"""A described decoder that can compute steps: in native code if available, else in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from acclimate.llm.decode.cache import StepCache
from acclimate.llm.decode.description import Decoder
from acclimate.llm.decode.native import NativeDecoder, NativeStep
from acclimate.llm.decode.plain import PlainStep


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

    def go_on(self, cache: Any, starts: Tensor, length: int, room: int) -> Step:
        """Returns a step that continues from transformers' cache.

        Args:
            cache: transformers' cache, which is copied.
            starts: the position of each sequence's first token; earlier positions are padding.
            length: the number of positions in the cache.
            room: the number of positions to allocate.
        """
        own = self._cache(starts, max(room, length))
        own.take(cache, length)
        if self.native is None:
            return PlainStep(self.decoder, own, starts)
        return NativeStep(self.native, own, starts)

    def begin(self, starts: Tensor, room: int, given: Any = None) -> NativeStep | None:
        """Returns a step that also does the prefill; ``None`` if the model does it faster.

        Args:
            starts: the position of each sequence's first token; earlier positions are padding.
            room: the number of positions to allocate.
            given: transformers' cache with the first tokens of the prompt, which is copied.
        """
        if self.native is None or not self.native.prefills:
            return None
        own = self._cache(starts, room)
        if given is not None:
            own.take(given, given.get_seq_length())
        return NativeStep(self.native, own, starts)

    def _cache(self, starts: Tensor, room: int) -> StepCache:
        by_column = self.native is not None
        return StepCache(self.decoder, len(starts), starts.device, room, values_by_column=by_column)
