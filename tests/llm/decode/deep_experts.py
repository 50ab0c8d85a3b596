"""Deep models with experts and random weights, whose routers have near ties in bfloat16."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import GEMMA4_EXPERTS, model_class, randomise, tiny_config

LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "num_key_value_heads": 4, "head_dim": 8, "n_routed_experts": 64, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_group": 8,
}  # fmt: skip
DELTA_RULES = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
OF_64 = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 32}
GROUPS = {
    "n_routed_experts": 32, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "olmoe": {**OF_64, "intermediate_size": 32},
    "qwen3_moe": {**OF_64, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 32, "num_experts_per_tok": 8},
    "deepseek_v2": {
        **LATENT, "num_experts_per_tok": 6, "topk_group": 3, "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {**LATENT, "num_experts_per_tok": 8, "topk_group": 4, "norm_topk_prob": True},
    "dots1": GROUPS,
    "glm4_moe": {**GROUPS, "norm_topk_prob": False},
    "ernie4_5_moe": {"moe_num_experts": 32, "moe_k": 4},
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 6},
    "gemma4_text": {**GEMMA4_EXPERTS, "num_experts": 64, "top_k_experts": 8},
    "lfm2_moe": {
        "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "num_dense_layers": 1,
    },
    "qwen3_next": DELTA_RULES,
    "qwen3_5_moe_text": DELTA_RULES,
}  # fmt: skip
_MIXERS = {
    "gemma4_text": "sliding_attention", "lfm2_moe": "conv", "qwen3_next": "linear_attention",
    "qwen3_5_moe_text": "linear_attention",
}  # fmt: skip


def changes(name: str, layers: int) -> dict[str, Any]:
    """Returns what makes of a tiny config that of a deep model with experts."""
    found = {**CHANGES[name], "num_hidden_layers": layers}
    if name in _MIXERS:
        found["layer_types"] = [_MIXERS[name], "full_attention"] * (layers // 2)
    return found


def deep_model(name: str, layers: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Returns a model with random weights."""
    torch.manual_seed(0)
    model = model_class(name).from_config(tiny_config(name, **changes(name, layers)), dtype=torch.float32)
    return randomise(model.eval()).to(dtype)
