"""Writes a transformers model as llama.cpp's converter would: the same names, keys and changed values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tiny_models import CONTEXT, byte_level_tokenizer, sentencepiece_vocabulary

Array = np.ndarray[Any, Any]
Change = Callable[[dict[str, Any], dict[str, Array]], None]
"""Alters the keys and tensors of a file before it is written."""

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = _MOE | {"shared_expert_intermediate_size": 40}
_DELTA = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-3,
}

_GEMMA4: dict[str, Any] = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 5,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "pad_token_id": None,
}
_ALTERNATIVE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 20.0}

WITH_DELTA_RULES = ("qwen3next", "qwen35", "qwen35moe")

# Names of models here: llama.cpp's architecture, transformers' kind, and what differs from the defaults.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma": ("gemma", "gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", "gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5}),
    "gemma3": ("gemma3", "gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5}),
    "gemma4": ("gemma4", "gemma4_text", _GEMMA4 | _ALTERNATIVE),
    "gemma4-shared-keys": (
        "gemma4",
        "gemma4_text",
        _GEMMA4
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "final_logit_softcapping": 30.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 3e5,
                },
            },
        },
    ),
    "gemma4-experts": (
        "gemma4",
        "gemma4_text",
        _GEMMA4
        | _ALTERNATIVE
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "gpt2": (
        "gpt2",
        "gpt2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "layer_norm_epsilon": 1e-3},
    ),
    "gpt2-narrow": (
        "gpt2",
        "gpt2",
        {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": CONTEXT, "n_inner": 48},
    ),
    "gpt_oss": (
        "gpt-oss",
        "gpt_oss",
        COMMON
        | {
            "head_dim": 16,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 15e4,
                "original_max_position_embeddings": 16,
                "truncate": False,
            },
        },
    ),
    "lfm2": (
        "lfm2",
        "lfm2",
        COMMON
        | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "norm_eps": 1e-3},
    ),
    "lfm2_moe": (
        "lfm2moe",
        "lfm2_moe",
        COMMON
        | _MOE
        | {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "norm_eps": 1e-3,
            "routed_scaling_factor": 1.5,
        },
    ),
    "llama": ("llama", "llama", COMMON | {"attention_bias": True, "head_dim": 16, "rms_norm_eps": 1e-3}),
    "llama-linear": (
        "llama",
        "llama",
        COMMON | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
    ),
    "llama-yarn": (
        "llama",
        "llama",
        COMMON
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama3": (
        "llama",
        "llama",
        COMMON
        | {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 1e4,
            },
        },
    ),
    "mixtral": ("llama", "mixtral", COMMON | {"num_local_experts": 4, "rope_theta": 1e4}),
    "nemotron": ("nemotron", "nemotron", COMMON | {"head_dim": 8, "partial_rotary_factor": 0.25}),
    "phi3": ("phi3", "phi3", COMMON | {"sliding_window": 5}),
    "phi3-partial": (
        "phi3",
        "phi3",
        COMMON | {"tie_word_embeddings": True, "partial_rotary_factor": 0.75, "hidden_size": 64},
    ),
    "phi3-long": (
        "phi3",
        "phi3",
        COMMON
        | {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.5, 2.0, 2.5],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
            },
        },
    ),
    "qwen2-yarn": (
        "qwen2",
        "qwen2",
        COMMON
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 2.0,
                "rope_theta": 1e6,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2_moe": (
        "qwen2moe",
        "qwen2_moe",
        COMMON | _SHARED,
    ),
    "olmoe": (
        "olmoe",
        "olmoe",
        COMMON | {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    ),
    "qwen3": ("qwen3", "qwen3", COMMON | {"head_dim": 16}),
    "qwen3_moe": ("qwen3moe", "qwen3_moe", COMMON | _MOE | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3_next": ("qwen3next", "qwen3_next", COMMON | _SHARED | _DELTA | {"rope_theta": 1e6}),
    "qwen35": (
        "qwen35",
        "qwen3_5_text",
        COMMON
        | _DELTA
        | {
            "layer_types": ["full_attention", "linear_attention"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
    ),
    "qwen35-one-value-head-each": (
        "qwen35",
        "qwen3_5_text",
        COMMON | _DELTA | {"linear_num_value_heads": 2, "tie_word_embeddings": True},
    ),
    "qwen35_moe": (
        "qwen35moe",
        "qwen3_5_moe_text",
        {name: value for name, value in COMMON.items() if name != "intermediate_size"} | _SHARED | _DELTA,
    ),
    "stablelm": ("stablelm", "stablelm", COMMON | {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "stablelm2": (
        "stablelm",
        "stablelm",
        COMMON | {"qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.25},
    ),
    "starcoder2": (
        "starcoder2",
        "starcoder2",
        COMMON | {"rope_theta": 99999.0, "norm_epsilon": 1e-3, "hidden_act": "gelu_pytorch_tanh"},
    ),
}


def make_model(name: str, **changes: Any) -> Any:
    """A tiny model whose parameters are all random, biases and norms included."""
    _, kind, fields = MODELS[name]
    base = COMMON if kind.startswith("gemma") else {"bos_token_id": 0, "eos_token_id": 1}
    sizes = {"vocab_size": len(byte_level_tokenizer())}
    if kind == "gemma4_text":
        sizes["vocab_size_per_layer_input"] = sizes["vocab_size"]
    config = transformers.AutoConfig.for_model(kind, **(base | fields | sizes | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in [*model.parameters(), *(buffer for _, buffer in _stored_buffers(model))]:
            if parameter.dim() == 1 or "norm" in str(parameter.shape):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def _stored_buffers(model: Any) -> list[tuple[str, torch.Tensor]]:
    endings = ("expert_bias", "layer_scalar")
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(endings)]


def write_gguf(
    name: str,
    model: Any,
    path: Path,
    change: Change | None = None,
) -> Path:
    """Writes a model of :data:`MODELS`; ``change`` may alter the keys and tensors before."""
    architecture, _, _ = MODELS[name]
    keys, tensors = keys_of(model.config, architecture), dict(tensors_of(model, architecture))
    keys |= _byte_level_vocabulary()
    if change is not None:
        change(keys, tensors)
    return write_raw(path, keys.pop("general.architecture", architecture), keys, tensors)


def key(name: str, value: Any) -> Change:
    """Sets a key."""
    return lambda keys, _tensors: keys.__setitem__(name, value)


def without(name: str) -> Change:
    """Leaves out a key or a tensor."""
    return lambda keys, tensors: (keys.pop(name, None), tensors.pop(name, None))[1]


def tensor(name: str, *shape: int, value: float = 1.0) -> Change:
    """Replaces or adds a tensor whose elements are all equal."""
    return lambda _keys, tensors: tensors.__setitem__(name, np.full(shape, value, np.float32))


def write_raw(path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, Array]) -> Path:
    """A GGUF file of these keys and tensors; one of bytes is stored as blocks.

    These are of MXFP4 in a file of gpt-oss, and else of Q8_0; a pair of bytes and a type says it itself.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, (list, tuple)):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    for tensor_name, values in tensors.items():
        blocks = "MXFP4" if architecture == "gpt-oss" else "Q8_0"
        values, kind = values if isinstance(values, tuple) else (values, gguf.GGMLQuantizationType[blocks])
        kind = kind if values.dtype == np.uint8 else None
        writer.add_tensor(tensor_name, np.ascontiguousarray(values), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _byte_level_vocabulary() -> dict[str, Any]:
    tokenizer = byte_level_tokenizer()
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(names) - 2),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def sentencepiece_keys() -> dict[str, Any]:
    """The keys of a SentencePiece vocabulary of some 300 tokens."""
    tokens, scores, kinds = sentencepiece_vocabulary()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
    }


def keys_of(config: Any, architecture: str) -> dict[str, Any]:
    """The keys that say what a model's config says."""
    if architecture == "gemma4":
        return {f"gemma4.{key}": value for key, value in _gemma4_keys(config).items()}
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # a Gemma 3 has another for its windows
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    inner = getattr(config, "intermediate_size", None)
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": heads,
    }
    if architecture == "gpt2":
        inner = config.n_inner or 4 * config.n_embd
    if inner is not None:
        keys["feed_forward_length"] = inner
    epsilon = getattr(config, "norm_eps" if architecture.startswith("lfm2") else "rms_norm_eps", None)
    if epsilon is not None:
        keys["attention.layer_norm_rms_epsilon"] = epsilon
    else:
        names = ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
        keys["attention.layer_norm_epsilon"] = next(
            getattr(config, name) for name in names if getattr(config, name, None) is not None
        )
    if rope:
        keys["attention.head_count_kv"] = config.num_key_value_heads
        keys["rope.freq_base"] = float(rope["rope_theta"])
        keys["rope.dimension_count"] = int(head_size * rope.get("partial_rotary_factor", 1.0))
    if head_size != config.hidden_size // heads:
        keys["attention.key_length"] = keys["attention.value_length"] = head_size
    if rope.get("rope_type") in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "yarn" or architecture == "phi3":
        original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        keys["rope.scaling.original_context_length"] = original
    if architecture in ("phi3", "gemma2", "gemma3", "gpt-oss") and config.sliding_window:
        keys["attention.sliding_window"] = config.sliding_window
    if rope.get("rope_type") == "longrope" and architecture == "phi3":
        factor = config.max_position_embeddings / original
        keys["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(factor) / math.log(original))
    if architecture in ("lfm2", "lfm2moe"):
        heads_of = {"conv": 0, "full_attention": config.num_key_value_heads}
        keys["attention.head_count_kv"] = [heads_of[kind] for kind in config.layer_types]
        keys["shortconv.l_cache"] = config.conv_L_cache
    if architecture == "stablelm":
        keys["use_parallel_residual"] = config.use_parallel_residual
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        keys |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    if architecture == "gpt-oss":
        keys["expert_feed_forward_length"] = config.intermediate_size
    if architecture in ("qwen2moe", "qwen3moe", "qwen3next", "qwen35moe", "lfm2moe"):
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    if architecture == "lfm2moe":
        keys |= {
            "leading_dense_block_count": config.num_dense_layers,
            "expert_gating_func": 2,
            "expert_weights_scale": config.routed_scaling_factor,
            "vocab_size": config.vocab_size,
        }
    if architecture in WITH_DELTA_RULES:
        keys |= {
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
            "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
            "full_attention_interval": 4,
        }
    if architecture in ("qwen35", "qwen35moe"):
        keys["rope.dimension_sections"] = [*rope.get("mrope_section", (11, 11, 10)), 0]
    if architecture in ("qwen2moe", "qwen3next", "qwen35moe"):
        keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def _gemma4_keys(config: Any) -> dict[str, Any]:
    fields, blocks, shared = config.to_dict(), config.num_hidden_layers, config.num_kv_shared_layers
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    heads, width = fields["num_key_value_heads"], config.intermediate_size
    layers = [config.per_layer_config[layer] for layer in range(blocks)]
    sizes = [layers[windowed.index(is_windowed)].head_dim for is_windowed in (False, True)]
    rope = config.rope_parameters
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": blocks,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [layer.num_key_value_heads for layer in layers]
        if config.attention_k_eq_v
        else heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": windowed,
        "attention.shared_kv_layers": shared,
        "feed_forward_length": [width] * (blocks - shared) + [2 * width] * shared
        if config.use_double_wide_mlp
        else width,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "rope.freq_base": float(rope["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
    }
    for ending, size in zip(("", "_swa"), sizes, strict=True):
        keys |= {f"attention.key_length{ending}": size, f"attention.value_length{ending}": size}
        keys[f"rope.dimension_count{ending}"] = size
    if config.final_logit_softcapping is not None:
        keys["final_logit_softcapping"] = config.final_logit_softcapping
    if config.enable_moe_block:
        keys |= {"expert_count": config.num_experts, "expert_used_count": config.top_k_experts}
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    return keys


def _gemma4_tensor(block: str, parameter: str, values: Array) -> tuple[str, Array] | None:
    """Returns a tensor whose name gguf's table does not have."""
    own = {
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
    }
    return next(((f"{block}.{name}", values) for leaf, name in own.items() if parameter.endswith(leaf)), None)


def tensors_of(model: Any, architecture: str) -> Iterator[tuple[str, Array]]:
    """The tensors that hold a model's parameters."""
    config = model.config
    names = gguf.get_tensor_name_map(
        {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture],
        config.num_hidden_layers,
    )
    head_norms: dict[str, list[Array]] = {}
    for parameter, tensor in [*model.named_parameters(), *_stored_buffers(model)]:
        values = tensor.detach().float().numpy()
        layer = parameter.split(".")[2] if ".layers." in parameter or ".h." in parameter else ""
        if architecture == "gpt-oss" and ".experts." in parameter:
            leaf, kind = parameter.rpartition(".")[2].removesuffix("_bias"), "weight"
            values, kind = (values, "bias") if parameter.endswith("_bias") else (values.swapaxes(1, 2), kind)
            parts = (
                {"down": values} if leaf == "down_proj" else {"gate": values[:, ::2], "up": values[:, 1::2]}
            )
            for part, own in parts.items():
                yield f"blk.{layer}.ffn_{part}_exps.{kind}", own
            continue
        other = _gemma4_tensor(f"blk.{layer}", parameter, values) if architecture == "gemma4" else None
        if other is not None:
            yield other
            continue
        if parameter.endswith("experts.gate_up_proj"):
            gate, up = np.split(values, 2, axis=1)
            yield f"blk.{layer}.ffn_gate_exps.weight", gate
            yield f"blk.{layer}.ffn_up_exps.weight", up
            continue
        if ".norms." in parameter:
            which = "q" if ".q_layernorm." in parameter else "k"
            head_norms.setdefault(f"blk.{layer}.attn_{which}_norm.weight", []).append(values)
            continue
        if parameter.endswith("in_proj_qkvz.weight"):
            yield from _apart(values, config, f"blk.{layer}")
            continue
        if architecture in ("qwen35", "qwen35moe") and ".linear_attn." in parameter:
            values = _value_heads_in_turns(values, parameter, config)
        if parameter.endswith(".A_log"):
            yield f"blk.{layer}.ssm_a", -np.exp(values)
            continue
        parameter = parameter.replace(".dt_bias", ".dt_proj.bias").replace(
            ".expert_bias", ".expert_bias.bias"
        )
        name = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        if not name.endswith((".weight", ".bias")):
            name += ".weight"
        if parameter.endswith(("conv1d.weight", "conv.conv.weight")):
            values = values[:, 0]
        if architecture == "gpt2" and parameter.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            values = values.T
        adds_one = architecture in ("gemma", "gemma2", "gemma3", "nemotron", *WITH_DELTA_RULES)
        if adds_one and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
            values = values + 1
        if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
            heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
            split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = split.swapaxes(1, 2).reshape(values.shape)
        if name.endswith("ffn_gate_inp_shexp.weight") and architecture == "qwen2moe":
            values = values[0]
        yield name, values
    for name, stacked in head_norms.items():
        yield name, np.stack(stacked)
    rope = getattr(config, "rope_parameters", None) or {}
    if architecture == "gemma4":
        whole = config.per_layer_config["full_attention"].head_dim // 2
        turning = int(whole * rope["full_attention"]["partial_rotary_factor"])
        yield "rope_freqs.weight", np.array([1.0] * turning + [1e30] * (whole - turning), np.float32)
    if rope.get("rope_type") == "longrope" and architecture == "llama":  # made from such a file
        yield "rope_freqs.weight", np.array(rope["short_factor"], np.float32)
    elif rope.get("rope_type") == "longrope":
        for which in ("short", "long"):
            yield f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32)
    if rope.get("rope_type") == "llama3":
        size = config.head_dim
        usual = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
        yield "rope_freqs.weight", (usual / model.model.rotary_emb.inv_freq).numpy()


def _apart(values: Array, config: Any, block: str) -> Iterator[tuple[str, Array]]:
    """Yields the queries, keys and values of a Qwen3-Next, and its gates, which transformers has by group."""
    keys, size = config.linear_num_key_heads, config.linear_key_head_dim
    group = config.linear_num_value_heads // keys * config.linear_value_head_dim
    groups = values.reshape(keys, 2 * size + 2 * group, -1)
    parts = np.split(groups, np.cumsum([size, size, group]), axis=1)
    queries, keys_of_groups, values_of_groups, gates = (part.reshape(-1, values.shape[1]) for part in parts)
    yield f"{block}.attn_qkv.weight", np.concatenate([queries, keys_of_groups, values_of_groups])
    yield f"{block}.attn_gate.weight", gates


def _value_heads_in_turns(values: Array, parameter: str, config: Any) -> Array:
    """Returns a parameter of a Qwen 3.5 with the first value head of each group, then the second of each."""
    groups, leaf = config.linear_num_key_heads, parameter.split(".linear_attn.")[1]
    if leaf == "norm.weight":
        return values
    if leaf == "out_proj.weight":
        return _value_heads_in_turns(values.T, "x.linear_attn.in_proj_z.weight", config).T
    others = 2 * groups * config.linear_key_head_dim if leaf.startswith(("in_proj_qkv", "conv1d")) else 0
    heads = values[others:].reshape(groups, config.linear_num_value_heads // groups, -1, *values.shape[1:])
    return np.concatenate([values[:others], heads.swapaxes(0, 1).reshape(-1, *values.shape[1:])])
