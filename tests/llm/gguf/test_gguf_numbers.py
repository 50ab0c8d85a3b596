"""Keys and tensors that change a model's numbers give llama.cpp's logits, or are refused by name.

What llama.cpp gave is recorded in llama_cpp_logits.json, by record_llama_cpp.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import make_model, write_gguf
from number_files import CASES, COMPARED, TOKENS, write_numbers_file

from acclimate.errors import UnsupportedModelError
from acclimate.llm import load_model
from acclimate.llm.gguf.convert import converted_gguf

RECORD = json.loads(Path(__file__).with_name("llama_cpp_logits.json").read_text())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if "blocks" in name or place % 2 else ())
        for place, name in enumerate(CASES)
    ],
)
def test_logits_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    loaded = load_model(write_numbers_file(tmp_path / "model.gguf", name), dtype="float32")
    with torch.no_grad():
        logits = loaded.module(torch.tensor([TOKENS])).logits[0, -1, :COMPARED]
    # llama.cpp looks up the GELU of Gemma's models in a table of half precision; its errors add up.
    tolerance = 1e-4 if not name.startswith("gemma") else 2e-2 if "blocks" in name else 3e-3
    torch.testing.assert_close(logits, torch.tensor(RECORD[name]), rtol=0, atol=tolerance)


def test_the_recorded_cases_differ_from_a_model_without_their_keys() -> None:
    plain = torch.tensor(RECORD["llama"])
    for name in RECORD:
        if name.startswith("llama, ") and name != "llama, a factor and no method":
            assert (torch.tensor(RECORD[name]) - plain).abs().max() > 1e-2, name


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "llama.attention.causal", False),
        ("gpt2", "gpt2.attention.causal", False),
        ("llama", "llama.rope.scaling.yarn_ext_factor", 0.0),
        ("llama", "llama.rope.scaling.yarn_attn_factor", 0.5),
        ("gemma3", "gemma3.rope.scaling.attn_factor", 1.3),
        ("qwen3_moe", "qwen3moe.expert_weights_norm", False),
        ("qwen2_moe", "qwen2moe.expert_weights_norm", True),
        ("mixtral", "llama.expert_weights_norm", False),
        ("mixtral", "llama.expert_gating_func", 2),
        ("mixtral", "llama.expert_weights_scale", 2.5),
        ("llama", "llama.attention.scale", 0.1),
        ("llama", "llama.attention.clamp_kqv", 8.0),
        ("llama", "llama.residual_scale", 0.5),
        ("llama", "llama.embedding_scale", 12.0),
    ],
)
def test_a_key_that_changes_numbers_in_another_way_is_refused_by_name(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    def change(keys: dict[str, Any], _tensors: dict[str, Any]) -> None:
        keys[key] = value

    path = write_gguf(name, make_model(name), tmp_path / "model.gguf", change)
    with pytest.raises(UnsupportedModelError, match=key.replace(".", r"\.")):
        converted_gguf(path, "float32")
