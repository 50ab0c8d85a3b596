"""The config of the transformers model that a GGUF file holds, from the file's own keys and tensors.

transformers' reader takes some of the keys and leaves the rest at the defaults of its config classes, which
are one checkpoint's values: a file with another rotary width, window or scaling then loads and writes
nonsense. Here each key of the architecture is used, or known not to matter, or refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from acclimate.errors import CorruptModelError, UnsupportedModelError
from acclimate.inference.gguf_header import GGUFHeader
from acclimate.inference.gguf_metadata import Metadata


@dataclass(frozen=True)
class Architecture:
    """How the files of one llama.cpp architecture become a transformers model."""

    config: Callable[[Metadata], dict[str, Any]]
    """The fields of the config, ``model_type`` among them."""
    norms_plus_one: bool = False
    """Whether llama.cpp stores 1 + weight for each norm."""
    rotary_rows_interleaved: bool = False
    """Whether llama.cpp keeps the halves of each head that rotary embedding mixes next to each other."""
    transposed: frozenset[str] = field(default_factory=frozenset)
    """The parts of a block whose weights transformers keeps as (inputs, outputs)."""


def find_architecture(header: GGUFHeader) -> Architecture:
    """How to convert this file.

    Raises:
        UnsupportedModelError: it holds another kind of model, or a part of one.
    """
    path = header.path
    kind = header.value("general.type")
    if kind not in (None, "model"):
        raise UnsupportedModelError(f"{path} holds a GGUF of type {kind!r}, not a language model")
    parts = header.value("split.count")
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedModelError(
            f"{path} is one of {parts} parts of a model: join them first (llama-gguf-split --merge)"
        )
    found = ARCHITECTURES.get(header.architecture)
    if found is None:
        raise UnsupportedModelError(
            f"{path} holds a model of the architecture {header.architecture!r}, which cannot be converted; "
            f"these can: {', '.join(sorted(ARCHITECTURES))}"
        )
    return found


def config_fields(header: GGUFHeader, architecture: Architecture) -> dict[str, Any]:
    """What to make the model's config with; nothing in it is larger than the file's tensors say.

    Raises:
        CorruptModelError: a key is missing or makes no sense.
        UnsupportedModelError: a key asks for what transformers' model cannot do.
    """
    metadata = Metadata(header)
    blocks = metadata.size("block_count")
    found = {int(name.split(".")[1]) for name in metadata.tensors if _is_in_a_block(name)}
    if found != set(range(min(blocks, len(found) + 1))):
        raise CorruptModelError(
            f"{header.path} is corrupt: it promises {blocks:,} blocks and has the tensors of {len(found):,}"
        )
    rows, width = metadata.shape("token_embd.weight", 2)
    if width != metadata.size("embedding_length"):
        raise CorruptModelError(
            f"{header.path}: tensor 'token_embd.weight' has {width:,} columns, "
            f"its model needs {metadata.size('embedding_length'):,}"
        )
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if tokens is None or tokens.array_length is None:
        raise CorruptModelError(f"{header.path} holds no vocabulary: it lacks the key tokenizer.ggml.tokens")
    if tokens.array_length > rows:
        raise CorruptModelError(
            f"{header.path} is corrupt: its vocabulary has {tokens.array_length:,} tokens, its model {rows:,}"
        )
    named = {"_model_name_or_path": header.value("general.name"), "unk_token_id": metadata.token("unknown")}
    fields = {
        **{name: value for name, value in named.items() if value is not None},
        "vocab_size": rows,
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "bos_token_id": metadata.token("bos"),
        "eos_token_id": metadata.token("eos"),
        "pad_token_id": metadata.token("padding"),
        **architecture.config(metadata),
    }
    metadata.refuse_unread()
    return fields


def _is_in_a_block(name: str) -> bool:
    head, _, rest = name.partition(".")
    return head == "blk" and rest.partition(".")[0].isdecimal()


# -- what architectures share --------------------------------------------------------------------------


def _decoder(metadata: Metadata) -> dict[str, Any]:
    """What nearly all of them state, under the names that most configs use."""
    heads = metadata.size("attention.head_count")
    return {
        "max_position_embeddings": metadata.size("context_length"),
        "hidden_size": metadata.size("embedding_length"),
        "num_hidden_layers": metadata.size("block_count"),
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", heads),
    }


def _head_size(metadata: Metadata, *, free: bool = True) -> int:
    """The width of an attention head; ``free`` if the config can hold any."""
    width, heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    if width < heads:
        raise CorruptModelError(
            f"{metadata.header.path} is corrupt: {heads:,} heads share a width of {width:,}"
        )
    size = metadata.size("attention.key_length", width // heads)
    value_size = metadata.size("attention.value_length", size)
    if value_size != size or not (free or size == width // heads):
        raise UnsupportedModelError(
            f"{metadata.header.path} has attention heads of {size} for keys and {value_size} for values, "
            f"which a {metadata.header.architecture} model in transformers has no setting for"
        )
    return size


def _rope(metadata: Metadata, head_size: int, *, partial: bool = False, base: float = 1e4) -> dict[str, Any]:
    """The rotary embedding: its base, its width and how it is stretched."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", base)}
    rotated = metadata.size("rope.dimension_count", head_size)
    if partial:
        rope["partial_rotary_factor"] = rotated / head_size
    if rotated != head_size and not (partial and rotated < head_size):
        raise UnsupportedModelError(
            f"{metadata.header.path} rotates {rotated} of the {head_size} values of each head, "
            f"which a {metadata.header.architecture} model in transformers has no setting for"
        )
    scaling = metadata.text("rope.scaling.type", "none")
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    elif scaling == "yarn":
        factor = metadata.number("rope.scaling.factor")
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": metadata.size("rope.scaling.original_context_length"),
            "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
            "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0)
            * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
        }
    elif scaling not in ("none", "longrope"):  # longrope: its factors are tensors, see below
        raise UnsupportedModelError(
            f"{metadata.header.path} stretches its context by {scaling!r}, which cannot be converted"
        )
    elif metadata.number("rope.scaling.factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"{metadata.header.path} sets a factor to stretch its context by, but not how "
            f"({metadata.header.architecture}.rope.scaling.type)"
        )
    return rope | _rope_factors(metadata, rotated)


def _rope_factors(metadata: Metadata, rotated: int) -> dict[str, Any]:
    """The factors by which each frequency is divided, where the file has them as tensors.

    Llama 3.1 and later have one list (``rope_freqs``), Phi 3 has one for short and one for long contexts.
    """
    names = ("rope_factors_short.weight", "rope_factors_long.weight")
    if "rope_freqs.weight" in metadata.tensors:
        factors = _float32_tensor(metadata, "rope_freqs.weight", rotated // 2)
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": metadata.size("context_length"),
        }
    if not any(name in metadata.tensors for name in names):
        return {}
    short, long = (_float32_tensor(metadata, name, rotated // 2) for name in names)
    original = metadata.size("rope.scaling.original_context_length")
    factor = metadata.size("context_length") / original
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": metadata.number("rope.scaling.attn_factor", usual),
        "original_max_position_embeddings": original,
    }


def _float32_tensor(metadata: Metadata, name: str, count: int) -> list[float]:
    import numpy as np

    header, shape = metadata.header, metadata.shape(name, 1)
    tensor = metadata.tensors[name]
    if shape != (count,) or tensor.ggml_type != 0:
        raise CorruptModelError(
            f"{header.path} is corrupt: tensor {name!r} must hold {count} values of float32; it has "
            f"{shape[0]:,} of ggml type {tensor.ggml_type}"
        )
    values = np.fromfile(header.path, "<f4", count, offset=header.data_start + tensor.offset)
    if len(values) != count or not np.all(np.isfinite(values) & (values > 0)):
        raise CorruptModelError(f"{header.path} is corrupt: tensor {name!r} must hold numbers above 0")
    return [float(value) for value in values]


def _has(metadata: Metadata, ending: str) -> bool:
    return any(name.startswith("blk.") and name.endswith(ending) for name in metadata.tensors)


def _rms(metadata: Metadata) -> float:
    return metadata.number("attention.layer_norm_rms_epsilon")


def _layer_norm(metadata: Metadata) -> float:
    return metadata.number("attention.layer_norm_epsilon")


def _experts(metadata: Metadata, count_field: str) -> dict[str, Any]:
    """A mixture of experts; their widths are those of the tensors."""
    count, width, _ = metadata.shape("blk.0.ffn_up_exps.weight", 3)
    used = metadata.size("expert_used_count")
    if count != metadata.size("expert_count") or used > count:
        raise CorruptModelError(
            f"{metadata.header.path} is corrupt: it has {count} experts, "
            f"promises {metadata.size('expert_count'):,} and uses {used:,} for a token"
        )
    if metadata.size("expert_feed_forward_length", width) != width:
        raise CorruptModelError(f"{metadata.header.path} is corrupt: its experts are {width:,} wide")
    if metadata.size_or_none("expert_gating_func") not in (None, 1):  # 1: softmax
        raise UnsupportedModelError(f"{metadata.header.path} chooses experts other than by softmax")
    return {count_field: count, "num_experts_per_tok": used}


# -- one function for each architecture ----------------------------------------------------------------


def _llama(metadata: Metadata) -> dict[str, Any]:
    head = _head_size(metadata)
    fields = _decoder(metadata) | {
        "model_type": "llama",
        "head_dim": head,
        "rms_norm_eps": _rms(metadata),
        "rope_parameters": _rope(metadata, head),
    }
    if metadata.size_or_none("expert_count") is not None:  # Mixtral has llama.cpp's name of Llama
        return fields | _experts(metadata, "num_local_experts") | {"model_type": "mixtral"}
    return fields | {
        "attention_bias": _has(metadata, ".attn_q.bias"),
        "mlp_bias": _has(metadata, ".ffn_up.bias"),
    }


def _gemma(metadata: Metadata) -> dict[str, Any]:
    head = _head_size(metadata)
    return _decoder(metadata) | {
        "model_type": "gemma",
        "head_dim": head,
        "rms_norm_eps": _rms(metadata),
        "rope_parameters": _rope(metadata, head),
    }


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    window = metadata.size_or_none("attention.sliding_window")
    return _gemma(metadata) | {
        "model_type": "gemma2",
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        **({} if window is None else {"sliding_window": window}),
        **_query_scale(metadata, blocks_of_27b=46),
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    fields = _gemma(metadata) | {"model_type": "gemma3_text", **_query_scale(metadata, blocks_of_27b=62)}
    rope = _rope(metadata, fields["head_dim"], base=1e6)
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 1e4)}
    fields["rope_parameters"] = {"sliding_attention": local, "full_attention": rope}
    window = metadata.size_or_none("attention.sliding_window")
    if window is not None:
        fields["sliding_window"] = window
    pattern, blocks = metadata.window_pattern() or 6, fields["num_hidden_layers"]
    windowed = [(i + 1) % pattern > 0 for i in range(blocks)] if isinstance(pattern, int) else list(pattern)
    if len(windowed) != blocks:
        raise CorruptModelError(
            f"{metadata.header.path} is corrupt: its sliding_window_pattern has {len(windowed):,} entries "
            f"for {blocks:,} blocks"
        )
    fields["layer_types"] = ["sliding_attention" if use else "full_attention" for use in windowed]
    return fields


def _query_scale(metadata: Metadata, blocks_of_27b: int) -> dict[str, Any]:
    """The file does not say it: llama.cpp also tells the 27B model by its number of blocks."""
    if metadata.size("block_count") != blocks_of_27b:
        return {}
    return {
        "query_pre_attn_scalar": metadata.size("embedding_length") // metadata.size("attention.head_count")
    }


def _qwen2(metadata: Metadata) -> dict[str, Any]:
    head = _head_size(metadata, free=False)
    return _decoder(metadata) | {
        "model_type": "qwen2",
        "rms_norm_eps": _rms(metadata),
        "rope_parameters": _rope(metadata, head),
    }


def _qwen3(metadata: Metadata) -> dict[str, Any]:
    head = _head_size(metadata)
    return _decoder(metadata) | {
        "model_type": "qwen3",
        "head_dim": head,
        "rms_norm_eps": _rms(metadata),
        "rope_parameters": _rope(metadata, head),
        "attention_bias": _has(metadata, ".attn_q.bias"),
    }


def _qwen2moe(metadata: Metadata) -> dict[str, Any]:
    shared = metadata.shape("blk.0.ffn_up_shexp.weight", 2)[0]
    if metadata.size("expert_shared_feed_forward_length", shared) != shared:
        raise CorruptModelError(f"{metadata.header.path} is corrupt: its shared expert is {shared:,} wide")
    return (
        _qwen2(metadata)
        | _experts(metadata, "num_experts")
        | {
            "model_type": "qwen2_moe",
            "moe_intermediate_size": metadata.shape("blk.0.ffn_up_exps.weight", 3)[1],
            "shared_expert_intermediate_size": shared,
        }
    )


def _qwen3moe(metadata: Metadata) -> dict[str, Any]:
    return (
        _qwen3(metadata)
        | _experts(metadata, "num_experts")
        | {
            "model_type": "qwen3_moe",
            "moe_intermediate_size": metadata.shape("blk.0.ffn_up_exps.weight", 3)[1],
            "norm_topk_prob": True,  # as llama.cpp computes it
        }
    )


def _phi3(metadata: Metadata) -> dict[str, Any]:
    head = _head_size(metadata, free=False)
    rope = _rope(metadata, head, partial=True)
    original = metadata.size("rope.scaling.original_context_length", metadata.size("context_length"))
    metadata.number("rope.scaling.attn_factor", 1.0)  # for short and long factors, which few files have
    return _decoder(metadata) | {
        "model_type": "phi3",
        "rms_norm_eps": _rms(metadata),
        "rope_parameters": rope,
        "original_max_position_embeddings": original,
        "sliding_window": metadata.size_or_none("attention.sliding_window"),
    }


def _stablelm(metadata: Metadata) -> dict[str, Any]:
    head = _head_size(metadata, free=False)
    return _decoder(metadata) | {
        "model_type": "stablelm",
        "layer_norm_eps": _layer_norm(metadata),
        "rope_parameters": _rope(metadata, head, partial=True),
        "use_qkv_bias": _has(metadata, ".attn_q.bias"),
        "qk_layernorm": _has(metadata, ".attn_q_norm.weight"),
        "use_parallel_residual": metadata.flag(
            "use_parallel_residual", not _has(metadata, ".ffn_norm.weight")
        ),
    }


def _starcoder2(metadata: Metadata) -> dict[str, Any]:
    head = _head_size(metadata, free=False)
    return _decoder(metadata) | {
        "model_type": "starcoder2",
        "norm_epsilon": _layer_norm(metadata),
        "rope_parameters": _rope(metadata, head),
        "use_bias": _has(metadata, ".attn_q.bias"),
    }


def _nemotron(metadata: Metadata) -> dict[str, Any]:
    head = _head_size(metadata)
    return _decoder(metadata) | {
        "model_type": "nemotron",
        "head_dim": head,
        "norm_eps": _layer_norm(metadata),
        "rope_parameters": _rope(metadata, head, partial=True),
        "attention_bias": _has(metadata, ".attn_q.bias"),
        "mlp_bias": _has(metadata, ".ffn_up.bias"),
    }


def _gpt2(metadata: Metadata) -> dict[str, Any]:
    heads = metadata.size("attention.head_count")
    _head_size(metadata, free=False)
    if metadata.size("attention.head_count_kv", heads) != heads:
        raise UnsupportedModelError(f"{metadata.header.path} shares keys between heads, which GPT-2 cannot")
    return {
        "model_type": "gpt2",
        "n_positions": metadata.size("context_length"),
        "n_embd": metadata.size("embedding_length"),
        "n_layer": metadata.size("block_count"),
        "n_head": heads,
        "n_inner": metadata.size("feed_forward_length"),
        "layer_norm_epsilon": _layer_norm(metadata),
    }


ARCHITECTURES = {
    "gemma": Architecture(_gemma, norms_plus_one=True),
    "gemma2": Architecture(_gemma2, norms_plus_one=True),
    "gemma3": Architecture(_gemma3, norms_plus_one=True),
    "gpt2": Architecture(_gpt2, transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"})),
    "llama": Architecture(_llama, rotary_rows_interleaved=True),
    "nemotron": Architecture(_nemotron, norms_plus_one=True),
    "phi3": Architecture(_phi3),
    "qwen2": Architecture(_qwen2),
    "qwen2moe": Architecture(_qwen2moe),
    "qwen3": Architecture(_qwen3),
    "qwen3moe": Architecture(_qwen3moe),
    "stablelm": Architecture(_stablelm),
    "starcoder2": Architecture(_starcoder2),
}
"""llama.cpp's name of each architecture that can be converted."""
