"""Tiny models as GPTQ, AWQ, compressed-tensors and FP8 publish them, with the values their formats define.

Each function packs random numbers as the format's specification says, one code at a time, and returns the
tensors of the file and the values, computed from the same numbers in plain torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import byte_level_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Tensors = dict[str, Tensor]
Quantise = Callable[[int, int, torch.Generator], tuple[Tensors, Tensor]]
"""Takes rows, columns and a source of random numbers."""

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def _codes(n: int, k: int, bits: int, random: torch.Generator) -> Tensor:
    return torch.randint(0, 1 << bits, (n, k), generator=random)


def _scale(n: int, groups: int, bits: int, random: torch.Generator, dtype: torch.dtype) -> Tensor:
    return ((torch.rand(n, groups, generator=random) + 0.5) * 0.3 / (1 << bits)).to(dtype)


def _zeros(n: int, groups: int, bits: int, random: torch.Generator) -> Tensor:
    """Zeros near the middle, as files have them, with the smallest and the largest among them."""
    zeros = (1 << bits - 1) + torch.randint(-1, 2, (n, groups), generator=random)
    zeros[0, 0], zeros[-1, -1] = 0, (1 << bits) - 1
    return zeros


def _words(codes: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """Packs the last dimension into 32-bit words, the first code in the lowest bits."""
    per = 32 // bits
    places = order or list(range(per))
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per)).unflatten(-1, (-1, per))
    words = sum(codes[..., places[i]].long() << bits * i for i in range(per))
    return (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32).contiguous()  # type: ignore[union-attr]


def gptq(
    bits: int = 4, group: int = 32, is_symmetric: bool = True, version: int = 1, order: str = "",
    dtype: torch.dtype = torch.float16,
) -> Quantise:  # fmt: skip
    """``order``: "" (no g_idx), "plain" or "shuffled" (desc_act)."""

    def quantise(n: int, k: int, random: torch.Generator) -> tuple[Tensors, Tensor]:
        size = group if group > 0 else k
        groups = -(-k // size)
        codes, scale = _codes(n, k, bits, random), _scale(n, groups, bits, random, dtype)
        zero = _zeros(n, groups, bits, random)
        if is_symmetric:
            zero = torch.full_like(zero, 1 << bits - 1)
        index = torch.arange(k) // size
        if order == "shuffled":
            index = index[torch.randperm(k, generator=random)]
        values = scale.float()[:, index] * (codes - zero[:, index])
        stored = _words(zero.T, bits)
        if version == 1:  # the first format stores each zero less 1, subtracted from the whole words
            ones = sum(1 << bits * i for i in range(32 // bits))
            stored = ((stored.long() - ones) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
        made = {
            "qweight": _words(codes, bits).T.contiguous(),
            "qzeros": stored,
            "scales": scale.T.contiguous(),
        }
        return (made | {"g_idx": index.int()} if order else made), values

    return quantise


def awq(group: int = 32) -> Quantise:
    def quantise(n: int, k: int, random: torch.Generator) -> tuple[Tensors, Tensor]:
        codes, scale = _codes(n, k, 4, random), _scale(n, k // group, 4, random, torch.float16)
        zero = _zeros(n, k // group, 4, random)
        index = torch.arange(k) // group
        made = {
            "qweight": _words(codes.T, 4, AWQ_ORDER),
            "qzeros": _words(zero.T, 4, AWQ_ORDER),
            "scales": scale.T.contiguous(),
        }
        return made, scale.float()[:, index] * (codes - zero[:, index])

    return quantise


def packed(
    bits: int = 4, group: int = 32, is_symmetric: bool = True, dtype: torch.dtype = torch.bfloat16
) -> Quantise:
    """compressed-tensors, pack-quantized."""

    def quantise(n: int, k: int, random: torch.Generator) -> tuple[Tensors, Tensor]:
        size = group if group > 0 else k
        codes, scale = _codes(n, k, bits, random), _scale(n, k // size, bits, random, dtype)
        zero = _zeros(n, k // size, bits, random)
        if is_symmetric:
            zero = torch.full_like(zero, 1 << bits - 1)
        index = torch.arange(k) // size
        made = {
            "weight_packed": _words(codes, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor([n, k]),
        }
        if not is_symmetric:
            made["weight_zero_point"] = _words(zero.T, bits).T.contiguous()
        return made, scale.float()[:, index] * (codes - zero[:, index])

    return quantise


def whole_numbers(group: int = 0, is_symmetric: bool = True) -> Quantise:
    """compressed-tensors, int-quantized."""

    def quantise(n: int, k: int, random: torch.Generator) -> tuple[Tensors, Tensor]:
        size = group or k
        codes = _codes(n, k, 8, random) - 128
        scale = _scale(n, k // size, 8, random, torch.bfloat16)
        index = torch.arange(k) // size
        made = {"weight": codes.to(torch.int8), "weight_scale": scale}
        zero = torch.zeros(n, k // size, dtype=torch.int8)
        if not is_symmetric:
            zero = torch.randint(-20, 20, zero.shape, generator=random).to(torch.int8)
            made["weight_zero_point"] = zero
        return made, scale.float()[:, index] * (codes - zero[:, index])

    return quantise


def float8(shape: str, block: int = 128, name: str = "weight_scale_inv") -> Quantise:
    """``shape``: "block", "row" or "matrix"."""

    def quantise(n: int, k: int, random: torch.Generator) -> tuple[Tensors, Tensor]:
        # torch 2.10 makes NaN of what is too large for the dtype.
        weight = (torch.randn(n, k, generator=random) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        sizes = {"block": (-(-n // block), -(-k // block)), "row": (n, 1), "matrix": ()}[shape]
        scale = torch.rand(sizes, generator=random) * 1e-3 + 1e-3
        spread = scale
        if shape == "block":
            spread = scale.repeat_interleave(block, 0)[:n].repeat_interleave(block, 1)[:, :k]
        return {"weight": weight, name: scale}, weight.float() * spread

    return quantise


def compressed(weights: Mapping[str, Any], form: str) -> dict[str, Any]:
    """Settings of compressed-tensors for all linear modules."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }  # fmt: skip


GPTQ_4 = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ_4 = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
INT_4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT_8 = {"num_bits": 8, "type": "int", "strategy": "channel"}

FILES: dict[str, tuple[Quantise, dict[str, Any], set[str]]] = {
    # how to quantise, the settings, and the weight formats that hold the numbers
    "gptq": (gptq(), GPTQ_4, {"q4_0"}),
    "gptq v2, asymmetric": (
        gptq(is_symmetric=False, version=2),
        GPTQ_4 | {"sym": False, "checkpoint_format": "gptq_v2"},
        {"uint4"},
    ),
    "gptq, asymmetric": (gptq(is_symmetric=False), GPTQ_4 | {"sym": False}, {"uint4"}),
    "gptq, 8 bits": (gptq(8), GPTQ_4 | {"bits": 8}, {"q8_0"}),
    "gptq, 8 bits, asymmetric": (gptq(8, is_symmetric=False), GPTQ_4 | {"bits": 8}, {"uint8"}),
    "gptq, 2 bits": (gptq(2, is_symmetric=False), GPTQ_4 | {"bits": 2}, {"uint4"}),
    "gptq, whole rows": (gptq(group=-1), GPTQ_4 | {"group_size": -1}, {"q4_0"}),
    "gptq, groups in order": (gptq(order="plain"), GPTQ_4, {"q4_0"}),
    "awq": (awq(), AWQ_4, {"uint4"}),
    "packed": (packed(), compressed(INT_4, "pack-quantized"), {"q4_0"}),
    "packed, asymmetric": (packed(is_symmetric=False), compressed(INT_4, "pack-quantized"), {"uint4"}),
    "packed, 8 bits": (packed(8), compressed(INT_4 | {"num_bits": 8}, "pack-quantized"), {"q8_0"}),
    "packed, float32 scales of rows": (
        packed(group=-1, dtype=torch.float32), compressed(INT_4, "pack-quantized"), {"int8"}
    ),
    "int8 of rows": (whole_numbers(), compressed(INT_8, "int-quantized"), {"int8"}),
    "int8 of groups": (whole_numbers(64), compressed(INT_8, "int-quantized"), {"q8_0"}),
    "int8, asymmetric": (whole_numbers(is_symmetric=False), compressed(INT_8, "int-quantized"), {"uint8"}),
}  # fmt: skip


def save_published(
    folder: Path, quantise: Quantise, settings: Mapping[str, Any], *, hidden: int = 128, damage: Any = None
) -> Any:
    """Writes a model whose linear layers are quantised; returns it in float32, with the values of its file.

    Args:
        folder: where to write it.
        quantise: how a linear layer is quantised.
        settings: the ``quantization_config``.
        hidden: the width of the model.
        damage: changes the file's tensors before they are written.
    """
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0,
        eos_token_id=1, pad_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    random = torch.Generator().manual_seed(5)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors: Tensors = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and ".layers." in name:
                parts, values = quantise(*parameter.shape, random)
                parameter.copy_(values)
                tensors |= {f"{name.removesuffix('.weight')}.{leaf}": part for leaf, part in parts.items()}
            else:
                tensors[name] = parameter.detach().half().clone()
                parameter.copy_(tensors[name])
    if damage is not None:
        damage(tensors)
    model.config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"quantization_config": dict(settings)}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


COMMON: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": None, "initializer_range": 0.3,
}  # fmt: skip


def empty_folder(folder: Path, config: Any, settings: dict[str, Any]) -> Any:
    """Writes a tokenizer and a config; returns the model in float32."""
    byte_level_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"quantization_config": settings}))
    return model


@torch.no_grad()
def save_gpt_oss(folder: Path) -> Any:
    """Writes a gpt-oss with experts in MXFP4; returns the model in float32, with the values of the file."""
    words = len(byte_level_tokenizer())
    config = GptOssConfig(vocab_size=words, num_local_experts=4, num_experts_per_tok=2, **COMMON)
    model = empty_folder(folder, config, {"quant_method": "mxfp4"})
    random, tensors = torch.Generator().manual_seed(1), {}
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, k, n = parameter.shape
            blocks = torch.randint(0, 256, (experts, n, k // 32, 16), generator=random, dtype=torch.uint8)
            scales = torch.randint(120, 126, (experts, n, k // 32), generator=random, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        else:
            tensors[name] = parameter.to(torch.bfloat16)
            parameter.copy_(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model
