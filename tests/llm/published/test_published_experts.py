"""Experts that are quantised in their files keep their bits: those of MXFP4, and those of GPTQ and AWQ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from published_files import AWQ_4, COMMON, GPTQ_4, awq, empty_folder, gptq, save_gpt_oss
from safetensors.torch import save_file
from tiny_models import byte_level_tokenizer
from transformers import Qwen3MoeConfig

import acclimate
from acclimate.errors import CorruptModelError

IDS = torch.tensor([[0, 5, 9, 17, 40, 3]])


@pytest.mark.slow
def test_mxfp4_experts_keep_their_values_in_their_own_bits(tmp_path: Path) -> None:
    expected = save_gpt_oss(tmp_path)
    model = acclimate.init_inference(tmp_path)
    assert dict(model.packing.packed) == {"mxfp4": 4}
    for found, own in zip(model.model.layers, expected.model.layers, strict=True):
        assert torch.equal(
            found.mlp.experts.packed_stacks["down_proj"].dequantize(), own.mlp.experts.down_proj
        )
    with torch.inference_mode():
        logits, exact = (loaded(IDS).logits.float() for loaded in (model, expected))
    # In bfloat16, with inputs rounded to 8 bits, where the other has float32: texts differ at a near tie.
    assert float((logits - exact).abs().max() / exact.abs().max()) < 0.1
    options = {"max_new_tokens": 1, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), expected.generate(IDS, **options))


def test_mxfp4_experts_are_unpacked_in_a_dtype_that_was_asked_for(tmp_path: Path) -> None:
    expected = save_gpt_oss(tmp_path)
    model = acclimate.init_inference(tmp_path, dtype="float32")
    for found, own in zip(model.model.layers, expected.model.layers, strict=True):
        assert torch.equal(found.mlp.experts.gate_up_proj, own.mlp.experts.gate_up_proj)
        assert torch.equal(found.mlp.experts.down_proj, own.mlp.experts.down_proj)


def test_mxfp4_experts_without_scales_are_an_error_that_names_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save_gpt_oss(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptModelError, match=r"lacks the tensor .*1\.mlp\.experts\.down_proj_scales"):
        acclimate.init_inference(tmp_path)


@pytest.mark.parametrize(
    ("quantise", "settings", "kind"), [(gptq(), GPTQ_4, "q4_0"), (awq(), AWQ_4, "uint4")], ids=["gptq", "awq"]
)
def test_each_expert_of_a_published_model_is_packed(
    quantise: Any, settings: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    words = len(byte_level_tokenizer())
    config = Qwen3MoeConfig(
        vocab_size=words, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, **COMMON
    )
    expected = empty_folder(tmp_path, config, settings)
    random, tensors = torch.Generator().manual_seed(1), {}
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            prefix = name.removesuffix(".weight")
            if parameter.dim() == 3:
                for number, matrix in enumerate(parameter):
                    leaves = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
                    for leaf, rows in zip(leaves, matrix.chunk(len(leaves)), strict=True):
                        parts, values = quantise(*rows.shape, random)
                        rows.copy_(values)
                        own = f"{name.rpartition('.')[0]}.{number}.{leaf}"
                        tensors |= {f"{own}.{part}": tensor for part, tensor in parts.items()}
            elif parameter.dim() == 2 and "self_attn" in name:
                parts, values = quantise(*parameter.shape, random)
                parameter.copy_(values)
                tensors |= {f"{prefix}.{part}": tensor for part, tensor in parts.items()}
            else:
                tensors[name] = parameter.half()
                parameter.copy_(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = acclimate.init_inference(tmp_path)
    assert dict(model.packing.packed) == {kind: 2 * (4 + 2)}
    for found, whole in zip(model.model.layers, expected.model.layers, strict=True):
        for leaf in ("gate_up_proj", "down_proj"):
            stack = found.mlp.experts.packed_stacks[leaf]
            assert torch.equal(stack.dequantize(), getattr(whole.mlp.experts, leaf)), leaf
