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
GEMMA4_EXPERTS: dict[str, Any] = {
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32,
    "hidden_size_per_layer_input": 0, "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
"""What makes a Gemma 4 one with experts: router, experts and MLP have norms of their own."""
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


ENCODER_DECODERS = [
    "bart", "mbart", "t5", "mt5", "umt5", "pegasus", "marian", "m2m_100", "blenderbot", "blenderbot-small",
    "plbart", "switch_transformers", "mvp", "led", "bigbird_pegasus", "fsmt", "nllb-moe",
    "longt5", "whisper",
]  # fmt: skip
FURTHER = [
    *ENCODER_DECODERS, "olmoe", "glm4_moe", "granitemoeshared", "phimoe", "deepseek_v2", "minimax", "jetmoe",
    "doge", "dots1", "bitnet", "diffllama", "nanochat", "vaultgemma", "apertus", "ministral", "cwm",
    "gpt_neox_japanese", "openai-gpt", "hunyuan_v1_moe", "flex_olmo", "bert", "roberta", "ernie4_5_moe",
    "granitemoehybrid", "lfm2", "jamba", "gemma3n_text", "rwkv", "mamba", "zamba2", "dbrx",
]  # fmt: skip
"""Others, which are split right or refused."""
REFUSED = ("jetmoe", "dbrx")
"""Those of them that may be refused, each with a reason that holds."""
BART = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "decoder_start_token_id": 1, "forced_eos_token_id": None, "forced_bos_token_id": None,
}  # fmt: skip
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2, "num_heads": HEADS,
      "decoder_start_token_id": 1, "num_experts": 4}  # fmt: skip
SPECIAL |= dict.fromkeys(ENCODER_DECODERS, BART)
SPECIAL |= dict.fromkeys(("t5", "mt5", "umt5", "switch_transformers", "longt5"), T5)
SPECIAL |= {
    "fsmt": {**BART, "src_vocab_size": 160, "tgt_vocab_size": 160, "langs": ["a", "b"]},
    "nllb-moe": {**BART, "num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "whisper": {**BART, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64,
                "suppress_tokens": [], "begin_suppress_tokens": []},
    "bigbird_pegasus": {**BART, "attention_type": "original_full"},
    "led": {**BART, "attention_window": 8, "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64},
    "marian": {**BART, "decoder_vocab_size": 160},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
                 "topk_group": 1},
    "granitemoeshared": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
    "phimoe": {"num_local_experts": 4},
    "deepseek_v2": {**SPECIAL["deepseek_v3"], "topk_method": "greedy", "n_shared_experts": 1},
    "minimax": {"num_local_experts": 4, "layer_types": ["full_attention"] * 2},
    "jetmoe": {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "doge": {"is_moe": False},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
              "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "openai-gpt": OPENAI, "bert": {"is_decoder": True}, "roberta": {"is_decoder": True},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "granitemoehybrid": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64,
                         "layer_types": ["attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                     "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16},
    "jamba": {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
              "use_mamba_kernels": False},
    "gemma3n_text": {"intermediate_size": [128, 128], "vocab_size_per_layer_input": 160,
                     "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0, "laurel_rank": 8,
                     "activation_sparsity_pattern": [0.0, 0.0],
                     "layer_types": ["sliding_attention", "full_attention"]},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2,
               "hybrid_layer_ids": [1, 3],
               "num_mem_blocks": 1, "mamba_ngroups": 2, "n_mamba_heads": 8, "mamba_d_state": 16,
               "mamba_headdim": 16, "use_mem_eff_path": False, "adapter_rank": 8, "chunk_size": 16,
               "attention_hidden_size": 128, "attention_head_dim": 32},
    "ministral3": {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
        "max_position_embeddings": 128, "llama_4_scaling_beta": 0.4,
    }},
    "dbrx": {"d_model": 64, "n_heads": HEADS, "n_layers": 2, "max_seq_len": 128,
             "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
}  # fmt: skip


def tiny_config(name: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    values = {**BASE, **SPECIAL.get(name, {}), **changes}
    if changes.get("num_key_value_heads") is not None and name == "falcon":
        values["num_kv_heads"] = changes["num_key_value_heads"]
    if name == "falcon":
        del values["head_dim"]
    config = AutoConfig.for_model(name, **values)
    return config


def model_class(name: str) -> Any:
    import transformers

    if name == "whisper":
        return transformers.AutoModelForSpeechSeq2Seq
    return (
        transformers.AutoModelForSeq2SeqLM if name in ENCODER_DECODERS else transformers.AutoModelForCausalLM
    )


def prompt(name: str, batch: int) -> dict[str, torch.Tensor]:
    """What a model gets."""
    tokens = torch.arange(batch * 9).view(batch, 9) * 7 % 150 + 3
    if name == "whisper":
        return {"input_features": torch.randn(batch, 8, 40, generator=torch.Generator().manual_seed(0))}
    return {"input_ids": tokens}


def inputs(name: str, batch: int) -> dict[str, torch.Tensor]:
    """What a model gets in one call."""
    tokens = prompt("llama", batch)["input_ids"]
    return prompt(name, batch) | ({"decoder_input_ids": tokens} if name in ENCODER_DECODERS else {})


def tiny_model(name: str, **changes: Any) -> nn.Module:
    config = tiny_config(name, **changes)
    torch.manual_seed(0)
    model = model_class(name).from_config(config, dtype=torch.float32).eval()
    # Text that repeats one token would hide a wrong cache.
    for seed in range(1, 12):
        randomise(model, seed)
        text = model.generate(**prompt(name, 1), max_new_tokens=8, do_sample=False)
        if len(set(text[0, -8:].tolist())) > 3:
            break
    return model


def randomise(model: nn.Module, seed: int = 1) -> nn.Module:
    """Gives every parameter random values, also biases and norms, which a new model has all the same."""
    random = torch.Generator().manual_seed(seed)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
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
    with torch.device("meta"):
        model: nn.Module = model_class(name).from_config(tiny_config(name, **changes), dtype=torch.float32)
    return model.eval()
