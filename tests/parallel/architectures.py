"""Tiny random models of many architectures."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

HEADS = 4

ARCHITECTURES = [
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "gpt2",
    "gpt_neo",
    "gptj",
    "gpt_neox",
    "opt",
    "bloom",
    "falcon",
    "stablelm",
    "starcoder2",
    "olmo",
    "olmo2",
    "olmo3",
    "cohere",
    "cohere2",
    "granite",
    "granitemoe",
    "mpt",
    "codegen",
    "gpt_bigcode",
    "glm",
    "glm4",
    "smollm3",
    "ernie4_5",
    "deepseek_v3",
    "gpt_oss",
    "nemotron",
    "persimmon",
    "biogpt",
    "xglm",
    "helium",
    "arcee",
    "seed_oss",
    "hunyuan_v1_dense",
    "exaone4",
]

BASE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
OPENAI = {"n_embd": 64, "n_layer": 2, "n_head": HEADS, "n_positions": 128, "n_inner": 128}
SPECIAL: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                  "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2},
    "gpt2": OPENAI, "gpt_bigcode": OPENAI,
    "gptj": {**OPENAI, "rotary_dim": 8}, "codegen": {**OPENAI, "rotary_dim": 8},
    "gpt_neo": {"num_layers": 2, "num_heads": HEADS, "attention_types": [[["global", "local"], 1]]},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 2, "n_head": HEADS},
    "falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 128},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mpt": {"d_model": 64, "n_heads": HEADS, "n_layers": 2, "max_seq_len": 128, "expansion_ratio": 2},
    "deepseek_v3": {
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "num_key_value_heads": HEADS, "head_dim": 8,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "xglm": {"d_model": 64, "attention_heads": HEADS, "num_layers": 2, "ffn_dim": 128},
}  # fmt: skip
MULTI_HEAD = [
    "phi",
    "gpt2",
    "gpt_neo",
    "gptj",
    "gpt_neox",
    "opt",
    "bloom",
    "mpt",
    "codegen",
    "persimmon",
    "biogpt",
    "xglm",
    "deepseek_v3",
    "olmo",
]


def tiny_config(name: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    values = {**BASE, **SPECIAL.get(name, {}), **changes}
    if changes.get("num_key_value_heads") is not None and name == "falcon":
        values["num_kv_heads"] = changes["num_key_value_heads"]
    if name == "falcon":
        del values["head_dim"]
    config = AutoConfig.for_model(name, **values)
    return config


def tiny_model(name: str, **changes: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = tiny_config(name, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # Text that repeats one token would hide a wrong cache.
    for seed in range(1, 12):
        randomise(model, seed)
        text = model.generate(torch.arange(3, 12)[None], max_new_tokens=8, do_sample=False)
        if len(set(text[0, 9:].tolist())) > 3:
            break
    return model


def randomise(model: nn.Module, seed: int = 1) -> nn.Module:
    """Gives every parameter random values, also biases and norms, which a new model has all the same."""
    random = torch.Generator().manual_seed(seed)
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=random)
            if id(p) in tables:
                # Smaller, as a tied head would repeat the last token else.
                p.copy_(noise * (0.5 / p.shape[-1] ** 0.5))
            elif p.dim() >= 2:
                p.copy_(noise * (1.5 / p.shape[-1] ** 0.5))
            elif p.mean() > 0.5:
                p.copy_(1 + 0.3 * noise)
            else:
                p.copy_(0.3 * noise)
        for b in model.buffers():
            if b.is_floating_point() and b.dim() == 1 and not b.any():
                b.copy_(0.1 * torch.randn(b.shape, generator=random))
    return model


def meta_model(name: str, **changes: Any) -> nn.Module:
    """The same model without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(tiny_config(name, **changes), dtype=torch.float32)
    return model.eval()
