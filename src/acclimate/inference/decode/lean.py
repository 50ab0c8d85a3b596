"""A described decoder that is ready to step: in native code where there is some, else in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from acclimate.inference.decode.cache import StepCache
from acclimate.inference.decode.description import Decoder
from acclimate.inference.decode.native import NativeDecoder, NativeStep
from acclimate.inference.decode.plain import PlainStep


class Step(Protocol):
    """Computes what follows one more token of each sequence."""

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
        """Returns a step that goes on from transformers' cache.

        Args:
            cache: transformers', of which a copy is made.
            starts: the place of each sequence's first token; the places before it are padding.
            length: the places so far.
            room: the places to begin with.
        """
        own = self._cache(starts, max(room, length))
        own.take(cache, length)
        if self.native is None:
            return PlainStep(self.decoder, own, starts)
        return NativeStep(self.native, own, starts)

    def begin(self, starts: Tensor, room: int) -> NativeStep | None:
        """Returns a step that reads the prompt itself; ``None``: the model reads it faster.

        Args:
            starts: the place of each sequence's first token; the places before it are padding.
            room: the places to begin with.
        """
        if self.native is None or not self.native.reads_prompts:
            return None
        return NativeStep(self.native, self._cache(starts, room), starts)

    def _cache(self, starts: Tensor, room: int) -> StepCache:
        by_column = self.native is not None
        return StepCache(self.decoder, len(starts), starts.device, room, values_by_column=by_column)
