"""The keys and values of a step take memory only for the tokens that they hold."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

import acclimate
from acclimate.llm.decode.cache import StepCache
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
