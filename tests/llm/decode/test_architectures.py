"""Models of many architectures write transformers' text, past their windows and limits of positions."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import ARCHITECTURES, ENCODER_DECODERS, FURTHER, tiny_config, tiny_model

import acclimate
from acclimate.llm.decode.loop import step_kind
from quick_parameters import quick

PROMPT = torch.arange(3, 12)[None]
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
LONG = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "factor": 4.0,
    },
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("native", {}),
    "mistral": ("native", {}),
    "gemma3_text": ("native", LAYERS),
    "cohere2": ("native", LAYERS),
    "ministral3": ("native", {}),
    "llama": ("transformers", {**DYNAMIC, "max_position_embeddings": 32}),
    "phi3": ("native", LONG),
    "mixtral": ("native", {}),
}
"""The step that these take after a long text, and what changes their configuration. Dynamic frequencies are
those of a long text until transformers' loop writes a short one."""
NEWER = ["flint", "granite_swa", "internlm3", "jais2", "iquestcoder", "hyperclovax"]
OTHERS = [
    name for name in (*ARCHITECTURES, *FURTHER, *NEWER) if name not in KINDS and name not in ENCODER_DECODERS
]


def windowed(name: str, **changes: Any) -> Any:
    """Returns a tiny model whose window, if it has one, is smaller than the prompt."""
    window = {"sliding_window": 6} if hasattr(tiny_config(name, **changes), "sliding_window") else {}
    return tiny_model(name, **changes, **window)


def check_text(model: Any, count: int) -> Any:
    options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    made = acclimate.init_inference(copy.deepcopy(model))
    assert torch.equal(made.generate(PROMPT, **options), model.generate(PROMPT, **options))
    return made


@pytest.mark.parametrize("name", quick(tuple(KINDS), "gemma3_text"))
def test_text_is_transformers_past_windows_and_limits(name: str) -> None:
    kind, changes = KINDS[name]
    assert step_kind(check_text(windowed(name, **changes), 60)) == kind


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_text_of_further_architectures_is_transformers(name: str) -> None:
    config = tiny_config(name)
    longest = next(
        (getattr(config, n) for n in ("max_position_embeddings", "n_positions") if hasattr(config, n)), 128
    )
    check_text(windowed(name), min(200, longest - PROMPT.shape[1]))
