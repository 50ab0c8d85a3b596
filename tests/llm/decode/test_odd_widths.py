"""Quantised weights whose queries, keys, gates or ups do not fill whole groups of 16 rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import tiny_model

import acclimate
from acclimate.llm.decode.loop import lean_decoder, step_kind
from acclimate.llm.decode.proof import distance
from quick_parameters import quick

PROMPT = torch.arange(3, 48).view(3, 15)
# Kernels round inputs to 8 bits, which turns a difference in the last digit into one of 1 %.
ROUNDED_INPUTS = 0.05
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "keys begin within a group": ("llama", {"head_dim": 20, "num_key_value_heads": 2}),
    "parts of a module begin within a group": (
        "phi3",
        {"hidden_size": 80, "num_key_value_heads": 2, "intermediate_size": 72},
    ),
    "ups of experts begin within a group": (
        "qwen3_moe",
        {"moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2},
    ),
}


CASES = {f"{of}-{weight_format}": (of, weight_format) for of in MODELS for weight_format in ("int8", "int4")}


@pytest.mark.parametrize("case", quick(CASES, "keys begin within a group-int4"))
def test_the_native_step_gives_the_logits_of_the_modules(case: tuple[str, str]) -> None:
    of, weight_format = case
    name, changes = MODELS[of]
    model = acclimate.init_inference(tiny_model(name, **changes).bfloat16(), quantize=weight_format)
    assert step_kind(model) == "native"
    assert not any("experts" in name for name in model.packing.dense)
    lean: Any = lean_decoder(model)
    with torch.no_grad():
        whole = model(PROMPT)
        starts = torch.zeros(3, dtype=torch.long)
        before = model(PROMPT[:, :-1])
        step = lean.go_on(before.past_key_values, starts, PROMPT.shape[1] - 1, PROMPT.shape[1])
        assert distance(step(PROMPT[:, -1]), whole.logits[:, -1].float()) < ROUNDED_INPUTS
        reader = lean.begin(starts, PROMPT.shape[1])
        if reader is not None:
            found = reader.read(PROMPT, likeliest=False)
            assert distance(found, whole.logits[:, -1].float()) < ROUNDED_INPUTS
