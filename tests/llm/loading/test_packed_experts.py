"""Experts whose weights are quantised stay packed, in memory and in each token's step."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from architectures import tiny_model
from gguf_files import make_model, write_gguf

import acclimate
from acclimate.errors import QuantizationError
from acclimate.llm.decode.loop import step_kind
from acclimate.llm.kernels import PackedStack
from acclimate.llm.loading.load import load_model
from acclimate.llm.loading.packed_modules import hold_stack
from quick_parameters import quick

PROMPT = torch.arange(3, 12)[None]
MODELS = ["qwen3_moe", "gpt_oss", "qwen2_moe"]


def experts_of(model: Any) -> Any:
    return model.model.layers[0].mlp.experts


@pytest.fixture(params=quick(tuple(MODELS), "qwen3_moe"))
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A tiny model, and the same one with weights in 8 bits."""
    model = tiny_model(request.param)
    return model, acclimate.init_inference(copy.deepcopy(model), quantize="int8", dtype=torch.float32)


def test_experts_in_8_bits_take_a_quarter_of_float32_and_compute_nearly_the_same(
    models: tuple[Any, Any],
) -> None:
    own, ours = models
    dense, packed = experts_of(own), experts_of(ours)
    assert "gate_up_proj" not in dict(packed.named_parameters())
    bytes_packed = sum(stack.nbytes for stack in packed.packed_stacks.values())
    assert bytes_packed < 0.3 * (dense.gate_up_proj.nbytes + dense.down_proj.nbytes)
    assert packed.gate_up_proj.shape == dense.gate_up_proj.shape
    torch.manual_seed(0)
    given = torch.randn(5, 64), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    with torch.no_grad():
        expected, found = dense(*given), packed(*given)
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_the_step_of_packed_experts_writes_the_tokens_of_their_modules(models: tuple[Any, Any]) -> None:
    ours = models[1]
    assert step_kind(ours) == "native"
    texts = [
        ours.generate(
            PROMPT, max_new_tokens=12, do_sample=False, eos_token_id=None, return_dict_in_generate=whole
        )
        for whole in (False, True)  # the second one runs transformers' own loop
    ]
    assert torch.equal(texts[0], texts[1].sequences)


def test_packed_experts_are_read_only_and_a_state_dict_unpacks_them(models: tuple[Any, Any]) -> None:
    own, ours = models
    packed = experts_of(ours)
    with pytest.raises(QuantizationError, match="read-only"):
        packed.down_proj = torch.zeros(1)
    with pytest.raises(QuantizationError, match="read-only"):
        packed.down_proj.zero_()
    found = packed.state_dict()["down_proj"]
    expected = experts_of(own).down_proj
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 0.01 * expected.abs().max()


def test_experts_in_mxfp4_have_transformers_values_and_take_the_native_step() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = torch.Generator().manual_seed(0)
    model = tiny_model("gpt_oss")
    expected = copy.deepcopy(model)
    for layer, own in zip(model.model.layers, expected.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            experts, k, n = getattr(own.mlp.experts, name).shape
            blocks = torch.randint(0, 256, (experts, n, k // 32, 16), generator=random, dtype=torch.uint8)
            scales = torch.randint(120, 124, (experts, n, k // 32), generator=random, dtype=torch.uint8)
            values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            stack = PackedStack.from_mxfp4(blocks, scales, is_turned=True)
            assert torch.equal(stack.dequantize(), values)
            assert stack.nbytes <= 1.1 * (blocks.numel() + scales.numel())
            getattr(own.mlp.experts, name).data.copy_(values)
            hold_stack(layer.mlp.experts, name, stack, torch.float32, "cpu")
    ours = acclimate.init_inference(model)
    assert step_kind(ours) == "native"
    with torch.no_grad():
        found, wanted = ours(PROMPT).logits, expected(PROMPT).logits
    assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()


@pytest.mark.slow
def test_experts_of_a_gguf_file_keep_its_blocks(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    unpacked: dict[str, Any] = {}

    def pack(_keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name, values in tensors.items():
            if "_exps." in name:
                tensors[name] = gguf.quantize(values, kind)
                unpacked[name] = gguf.dequantize(tensors[name], kind)

    source = make_model("mixtral")
    loaded = load_model(write_gguf("mixtral", source, tmp_path / "experts.gguf", pack))
    packed = experts_of(loaded.module)
    assert {stack.format for stack in packed.packed_stacks.values()} == {"q8_0"}
    gate, up, down = (unpacked[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
    for name, expected in {"gate_up_proj": np.concatenate([gate, up], axis=1), "down_proj": down}.items():
        found = packed.packed_stacks[name].dequantize()
        assert np.array_equal(found.numpy(), expected)
    assert step_kind(loaded.module) == "native"
