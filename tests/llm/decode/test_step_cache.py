"""The keys and values of a step take memory only for the tokens that they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import acclimate
from acclimate.llm.decode.cache import ROOM, StepCache
from acclimate.llm.decode.loop import lean_decoder

TOKENS = 1 << 20


def test_room_for_many_tokens_takes_no_memory_before_they_come(tiny_folder: Path) -> None:
    model = acclimate.init_inference(tiny_folder)
    lean = lean_decoder(model)
    assert lean is not None
    process = psutil.Process()
    before = process.memory_info().rss
    cache = StepCache(lean.decoder, 1, torch.device("cpu"), TOKENS, values_by_column=True)
    taken = process.memory_info().rss - before
    size = sum(tensor.untyped_storage().nbytes() for tensor in (*cache.keys, *cache.values))
    assert size >= 100 << 20
    assert taken < size // 10
    assert not any(bool(tensor[:, :, :100].any()) for tensor in (*cache.keys, *cache.values))


def test_a_text_gets_no_room_for_tokens_that_cannot_come(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = acclimate.init_inference(tiny_folder)
    rooms, make = [], StepCache.__init__

    def made(self: StepCache, *given: Any, **options: Any) -> None:
        make(self, *given, **options)
        rooms.append(self.capacity)

    monkeypatch.setattr(StepCache, "__init__", made)
    prompt = torch.ones((1, 7), dtype=torch.int64)
    texts = [
        model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=most)
        for most in (5, ROOM + 1)
    ]
    assert rooms == [7 + 5, 7 + ROOM]
    assert texts[0].tolist() == texts[1][:, : 7 + 5].tolist()
