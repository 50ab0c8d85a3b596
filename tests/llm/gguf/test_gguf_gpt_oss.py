"""A gpt-oss file runs from its MXFP4 blocks, in the native step, also on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from expert_ranks import IDS, check_parts_of_experts, error
from gguf_files import make_model, write_gguf

import acclimate
from acclimate.llm.decode.loop import step_kind
from rank_processes import RankProcesses

KIND = gguf.GGMLQuantizationType.MXFP4
SIZES = {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 128}
OPTIONS = {"do_sample": False, "eos_token_id": None}


@torch.no_grad()
def save(folder: Path) -> tuple[Path, Any]:
    """Writes a file; returns the model in float32, with the file's values."""
    model = make_model("gpt_oss", **SIZES).float()
    for name, parameter in model.named_parameters():
        parameter.copy_(parameter.bfloat16())
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks = gguf.quantize(4 * parameter.transpose(1, 2).contiguous().numpy(), KIND)
            parameter.copy_(torch.from_numpy(gguf.dequantize(blocks, KIND)).transpose(1, 2))

    def pack(_keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith("_exps.weight"):
                tensors[name] = gguf.quantize(tensors[name], KIND)

    return write_gguf("gpt_oss", model, folder / "model.gguf", pack), model


def test_experts_keep_their_blocks_in_the_native_step(tmp_path: Path) -> None:
    path, expected = save(tmp_path)
    model = acclimate.init_inference(path)
    assert dict(model.packing.packed) == {"mxfp4": 4}
    assert model.packing.unpacked == {}
    for found, own in zip(model.model.layers, expected.model.layers, strict=True):
        for name, stack in found.mlp.experts.packed_stacks.items():
            assert torch.equal(stack.dequantize(), getattr(own.mlp.experts, name)), name
    assert step_kind(model) == "native"
    with torch.no_grad():
        assert error(model(IDS).logits.float(), expected) < 0.03


@pytest.mark.slow
def test_a_dtype_that_was_asked_for_unpacks_the_experts(tmp_path: Path) -> None:
    path, expected = save(tmp_path)
    model = acclimate.init_inference(path, dtype="float32")
    values = dict(model.named_parameters())
    for name, parameter in expected.named_parameters():
        assert torch.equal(values[name], parameter), name
    texts = [one.generate(IDS, max_new_tokens=100, **OPTIONS) for one in (model, expected)]
    assert torch.equal(*texts)


@pytest.mark.slow  # as ranks do of a published model in the same format
def test_two_ranks_hold_parts_of_each_expert_in_the_files_bits(two: RankProcesses, tmp_path: Path) -> None:
    check_parts_of_experts(two, *save(tmp_path))
