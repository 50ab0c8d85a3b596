"""Weights are read, checked and packed some rows at a time; dense ones by several threads at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from gguf_files import make_model, write_gguf
from tiny_models import save_tiny_model, write_tiny_gguf

import acclimate
from acclimate.errors import CorruptModelError
from acclimate.llm.files import deferred_tensors
from acclimate.llm.gguf import tensors
from acclimate.llm.loading import packer
from quick_parameters import quick

TYPES = gguf.GGMLQuantizationType


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer, "_PACKED_TOGETHER", 1)
    monkeypatch.setattr(deferred_tensors, "_REGION_BYTES", 100)


def quantised_experts(path: Path) -> Path:
    def pack(_keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name, values in tensors.items():
            if "_exps." in name:
                tensors[name] = gguf.quantize(values, TYPES.Q8_0)

    return write_gguf("mixtral", make_model("mixtral"), path, pack)


FILES = {
    "blocks": lambda path: write_tiny_gguf("gemma3", path, TYPES.Q8_0),
    "reordered blocks": lambda path: write_tiny_gguf("llama", path, TYPES.Q8_0),
    "bfloat16": lambda path: write_tiny_gguf("qwen3", path, TYPES.BF16),
    "reordered float16": lambda path: write_tiny_gguf("llama", path, TYPES.F16),
    "experts": quantised_experts,
}


def values_of(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = acclimate.init_inference(path).state_dict()
    return found


@pytest.mark.parametrize("kind", quick(tuple(FILES), "reordered blocks", "bfloat16"))
def test_pieces_give_the_values_of_the_whole(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = FILES[kind](tmp_path / "model.gguf")
    whole = values_of(path)
    request.getfixturevalue("small_pieces")
    pieces = values_of(path)
    assert whole.keys() == pieces.keys()
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


def test_blocks_take_memory_beside_their_packed_form_for_a_few_rows_only(
    tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, memory = [], tensors._memory
    path = write_tiny_gguf("gemma3", tmp_path / "model.gguf", TYPES.Q8_0)
    values_of(path)

    def watched(rows: int, row_bytes: int) -> Any:
        if row_bytes % 34 == 0:
            read.append(rows)
        return memory(rows, row_bytes)

    monkeypatch.setattr(tensors, "_memory", watched)
    model = acclimate.init_inference(path)
    assert model.get_input_embeddings().weight.shape[0] > 100
    assert max(read) == 16


def test_a_value_that_is_no_number_in_any_piece_is_an_error_that_names_the_tensor(
    tmp_path: Path, small_pieces: None
) -> None:
    folder = save_tiny_model("llama", tmp_path)
    values = load_file(folder / "model.safetensors")
    values["model.layers.1.mlp.up_proj.weight"][-1, -1] = float("nan")
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight .*NaN"):
        acclimate.init_inference(folder)


def test_a_model_loads_in_inference_mode_as_outside_of_it(tmp_path: Path, small_pieces: None) -> None:
    path = write_tiny_gguf("qwen3", tmp_path / "model.gguf", TYPES.F16)
    expected = values_of(path)
    with torch.inference_mode():
        found = acclimate.llm.load_model(path).module.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
