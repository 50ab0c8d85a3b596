"""Models that choose their rotary frequencies by the largest position of a call."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import make_model, write_gguf

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import tiny_model
from changed_weights import changed

import acclimate
from acclimate.llm.decode import loop
from quick_parameters import quick

ORIGINAL = 32
"""The number of tokens up to which a model uses its frequencies for short texts."""
PROMPT = torch.arange(3, 12)[None]
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "two lists of factors": (
        "phi3",
        {
            "original_max_position_embeddings": ORIGINAL,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL,
                "short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "factor": 4.0,
            },
        },
        ORIGINAL,
    ),
    "factors that grow": (
        "llama",
        {
            "max_position_embeddings": ORIGINAL,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
        ORIGINAL - 1,
    ),
}  # fmt: skip
"""Architecture, configuration, and the most tokens of a text that takes the native step."""


@functools.cache
def made(name: str) -> Any:
    kind, values, _ = MODELS[name]
    return tiny_model(kind, **values)


@functools.cache
def pair(name: str) -> tuple[Any, Any]:
    """The model, and the same one from ``init_inference``; texts change only the frequencies they keep."""
    return copy.deepcopy(made(name)), acclimate.init_inference(copy.deepcopy(made(name)))


def text(model: Any, length: int, **options: Any) -> Any:
    return model.generate(PROMPT, do_sample=False, eos_token_id=None, max_length=length, **options)


@pytest.mark.parametrize("name", quick(tuple(MODELS), "two lists of factors"))
def test_texts_with_short_frequencies_take_the_native_step_and_longer_ones_do_not(
    name: str, taken: list[bool]
) -> None:
    (own, ours), limit = pair(name), MODELS[name][2]
    assert loop.step_kind(ours) == "native"
    # The last text is a short one again, after the model has kept frequencies of a long one.
    for length in (limit, limit + 1, 60, limit):
        assert torch.equal(text(ours, length), text(own, length))
    assert taken[:3] == [True, False, False]


def test_frequencies_that_are_changed_after_a_text_count() -> None:
    own, ours = pair("two lists of factors")
    before = text(ours, ORIGINAL)
    frequencies = [model.model.rotary_emb.original_inv_freq for model in (own, ours)]
    with changed(*frequencies):
        for values in frequencies:
            values.mul_(0.3)
        found, expected = text(ours, ORIGINAL), text(own, ORIGINAL)
    assert torch.equal(found, expected)
    assert not torch.equal(found, before)


def test_a_far_position_of_padding_counts(taken: list[bool]) -> None:
    own, ours = pair("two lists of factors")
    mask = (torch.arange(9) > 2).long()[None]
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, ORIGINAL + 8)
    options = {"attention_mask": mask, "position_ids": positions}
    assert torch.equal(text(ours, 20, **options), text(own, 20, **options))
    assert taken == [False]


def test_a_gguf_file_with_the_frequencies_of_llama_3_takes_the_native_step(tmp_path: Path) -> None:
    path = write_gguf("llama3", make_model("llama3"), tmp_path / "model.gguf")
    ours = acclimate.init_inference(path, dtype="float32")
    assert loop.step_kind(ours) == "native"
    lean = loop.lean_decoder(ours)
    assert lean is not None
    assert lean.decoder.limit == ours.config.max_position_embeddings
    found = text(ours, 60)
    plain = text(ours, 60, return_dict_in_generate=True)
    assert torch.equal(found, plain.sequences)
