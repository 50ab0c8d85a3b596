"""What tests of convolutions and of delta rules have in common: texts, steps, and caches of callers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from padded_prompts import padded_batch
from torch import Tensor
from transformers import DynamicCache

from acclimate.llm.decode import loop
from acclimate.llm.decode.lean import LeanDecoder
from acclimate.llm.decode.loop import lean_decoder, step_kind

PROMPT = torch.arange(3, 12)[None]
ALWAYS: dict[str, Any] = {"do_sample": False, "eos_token_id": None}


def texts(models: tuple[Any, Any], **options: Any) -> tuple[Tensor, Tensor]:
    first, second = (model.generate(**{**ALWAYS, **options}) for model in models)
    return first, second


def random_text(length: int) -> Tensor:
    return torch.randint(3, 150, (1, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of_steps(lean: LeanDecoder, ids: Tensor, **options: Any) -> Tensor:
    step = lean.go_on(None, torch.zeros(1).long(), 0, 8, **options)
    return torch.cat([step(token).float() for token in ids[0].split(1)])


def lean_of(model: Any, kind: str = "native") -> LeanDecoder:
    """Returns a model's description, with another kind of step if it is not native."""
    lean = lean_decoder(model)
    assert lean is not None
    return lean if kind == "native" else LeanDecoder(lean.decoder, None, is_graph=kind == "graph")


def check_graph(models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """A graph of a padded batch, which is captured anew, gets transformers' tokens."""
    ours = models[1]
    lean = lean_of(ours, "graph")
    monkeypatch.setitem(loop._found, ours, (lean, loop._found[ours][1]))
    monkeypatch.setattr(loop, "ROOM", 4)
    assert step_kind(ours) == "graph"
    assert torch.equal(*texts(models, **padded_batch(), max_new_tokens=tokens))


def check_callers_cache(models: tuple[Any, Any]) -> None:
    """A cache of the caller's holds what transformers' does after each of three texts that continue it."""
    caches = [DynamicCache(config=model.config) for model in models]
    start = PROMPT[:, :2]  # shorter than a convolution
    for _ in range(3):
        made = [
            model.generate(start, past_key_values=own, max_new_tokens=2, **ALWAYS)
            for model, own in zip(models, caches, strict=True)
        ]
        assert torch.equal(*made)
        for expected, found in zip(*(own.layers for own in caches), strict=True):
            for name in kept_by(expected):
                torch.testing.assert_close(
                    getattr(found, name), getattr(expected, name), atol=1e-4, rtol=1e-4
                )
        start = torch.cat((made[0], PROMPT[:, :3]), 1)


def kept_by(layer: Any) -> tuple[str, ...]:
    """Returns the attributes of a layer of transformers' cache that hold what it keeps."""
    if not hasattr(layer, "conv_states"):
        return ("keys", "values")
    has_state = layer.is_recurrent_states_initialized[0]
    return ("conv_states", "recurrent_states") if has_state else ("conv_states",)


def text_of_a_thread(model: Any) -> Callable[..., list[int]]:
    """Returns what threads call with their number: prompts, padding and lengths of texts differ."""
    mask = torch.ones((1, 9), dtype=torch.long)
    mask[:, :4] = 0

    def generate(number: int, streamer: Any = None) -> list[int]:
        ids, own = PROMPT + 9 * number, mask if number == 1 else torch.ones_like(mask)
        length = 3 + 2 * number
        made = model.generate(
            ids[:, -length:],
            attention_mask=own[:, -length:],
            max_new_tokens=30 - 8 * number,
            streamer=streamer,
            **ALWAYS,
        )
        found: list[int] = made[0].tolist()
        return found

    return generate
