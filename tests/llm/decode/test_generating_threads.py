"""``generate`` uses threads without changing what other code sees of them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import tiny_model
from transformers import LogitsProcessor, LogitsProcessorList

import acclimate
from acclimate.llm.decode import loop

PROMPT = torch.arange(3, 12)[None]
OPTIONS: dict[str, Any] = {"do_sample": True, "max_new_tokens": 3, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


class Observer(LogitsProcessor):
    """Notes between the steps how many threads of torch a new thread of the program gets."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: self.seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return scores


@pytest.mark.usefixtures("three_threads")
def test_new_threads_keep_torchs_threads_while_another_samples() -> None:
    model = acclimate.init_inference(tiny_model("llama"))
    observer = Observer()
    model.generate(PROMPT, logits_processor=LogitsProcessorList([observer]), **OPTIONS)
    assert observer.seen == [3, 3, 3]
    assert torch.get_num_threads() == 3


def test_a_processor_that_runs_a_model_gets_transformers_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    original = loop.lean_sample

    def watched(*args: Any, **kwargs: Any) -> Any:
        taken.append(original(*args, **kwargs))
        return taken[-1]

    monkeypatch.setattr(loop, "lean_sample", watched)
    model = acclimate.init_inference(tiny_model("llama"))
    model.generate(PROMPT, guidance_scale=1.5, **OPTIONS)
    assert taken == [None]
