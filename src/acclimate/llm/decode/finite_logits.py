"""Refuses logits from which no token can be chosen: infinite ones, and NaN."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from acclimate.errors import LogitsError


def check_logits(largest: Tensor, dtype: torch.dtype) -> None:
    """Raises :class:`LogitsError` unless all sequences have finite logits.

    A logit of minus infinity is allowed beside finite ones: some models exclude tokens in this way.

    Args:
        largest: the largest logit of each sequence; NaN if any of its logits is NaN.
        dtype: the dtype in which the model computes.
    """
    found = next((value for value in largest.tolist() if not math.isfinite(value)), None)
    if found is None:
        return
    name = str(dtype).removeprefix("torch.")
    advice = (
        "its weights are damaged, or the model needs a larger range than float32"
        if dtype == torch.float32
        else f"the model may need a larger range than {name}: choose dtype float32"
    )
    raise LogitsError(f"the model's largest logit is {found}, so no token can be chosen; {advice}")


class FiniteLogits:
    """A logits processor that changes nothing, and raises :class:`LogitsError` for unusable logits.

    Args:
        dtype: the dtype in which the model computes.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the scores."""
        check_logits(scores.amax(-1), self._dtype)
        return scores


def with_finite_logits(processors: Any, dtype: torch.dtype) -> Any:
    """Returns transformers' list of logits processors, which begins with :class:`FiniteLogits`.

    The list stays as it is if one of them replaces such logits, which the caller of ``generate`` asked for.
    """
    from transformers import InfNanRemoveLogitsProcessor

    if not any(isinstance(processor, InfNanRemoveLogitsProcessor) for processor in processors):
        processors.insert(0, FiniteLogits(dtype))
    return processors


def without_check(processors: Any) -> Any | None:
    """Returns the list without :class:`FiniteLogits`, for code that checks logits; ``None``: it has none."""
    rest = type(processors)(processor for processor in processors if not isinstance(processor, FiniteLogits))
    return rest if len(rest) < len(processors) else None
