"""The GGUF architectures that are known here, and the fields that only some of their configs have."""

from __future__ import annotations

from typing import Any

from acclimate.errors import CorruptModelError, UnsupportedModelError, some_of
from acclimate.llm.gguf.config import Architecture, expert_shape, experts_fields, float32_tensor, has_tensor
from acclimate.llm.gguf.header import GGUFHeader
from acclimate.llm.gguf.metadata import Metadata


def find_architecture(header: GGUFHeader) -> Architecture:
    """Returns how to convert a file.

    Raises:
        UnsupportedModelError: the file holds another kind of model, or one part of a split model.
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
            f"choose one of: {', '.join(sorted(ARCHITECTURES))}"
        )
    return found


def _llama(metadata: Metadata, _fields: dict[str, Any]) -> dict[str, Any]:
    if metadata.size_or_none("expert_count") is not None:  # llama.cpp uses Llama's name for Mixtral
        return experts_fields(metadata, "num_local_experts", normalized=True) | {"model_type": "mixtral"}
    return {
        "attention_bias": has_tensor(metadata, ".attn_q.bias"),
        "mlp_bias": has_tensor(metadata, ".ffn_up.bias"),
    }


def _gemma2(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scale(metadata, fields, blocks_of_27b=46),
        "sliding_window": metadata.size("attention.sliding_window", 4096),
        "layer_types": _layer_types(metadata, fields["num_hidden_layers"], pattern=2),
    }


def _gemma3(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    # The windowed layers have a base of their own, and never a factor.
    rope, base = fields["rope_parameters"], metadata.number("rope.freq_base_swa", 1e4)
    local = {"rope_type": "default", "rope_theta": base}
    metadata.refuse_unless("rope.scaling.attn_factor", 1)
    cap = metadata.number_or_none("final_logit_softcapping")
    window = metadata.size_or_none("attention.sliding_window")
    types = _layer_types(metadata, fields["num_hidden_layers"], pattern=6)
    return {
        "rope_parameters": {"sliding_attention": local, "full_attention": rope},
        "layer_types": types if window else ["full_attention"] * len(types),
        "query_pre_attn_scalar": _query_scale(metadata, fields, blocks_of_27b=62),
        **({} if cap is None else {"final_logit_softcapping": cap}),
        **({} if window is None else {"sliding_window": window}),
    }


def _gemma4(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    blocks, size = fields["num_hidden_layers"], fields["head_dim"]
    types = _layer_types(metadata, blocks, pattern=6)
    windowed_size = metadata.size("attention.key_length_swa")
    shared = metadata.size_or_none("attention.shared_kv_layers") or 0
    metadata.refuse_unless("attention.value_length_swa", windowed_size)
    metadata.refuse_unless("rope.dimension_count", size)
    metadata.refuse_unless("rope.dimension_count_swa", windowed_size)
    inputs = metadata.size_or_none("embedding_length_per_layer_input")
    has_experts = metadata.size_or_none("expert_count") is not None
    return {
        "head_dim": windowed_size,
        "global_head_dim": size,
        "layer_types": types,
        "sliding_window": metadata.size("attention.sliding_window"),
        "num_kv_shared_layers": shared,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "use_double_wide_mlp": _has_wider_last_layers(metadata, blocks, shared),
        "hidden_size_per_layer_input": inputs or 0,
        "vocab_size_per_layer_input": metadata.shape("per_layer_token_embd.weight", 2)[0] if inputs else 1,
        "rope_parameters": {
            "full_attention": _proportional_rope(metadata, size),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.number("rope.freq_base_swa", 1e4),
            },
        },
        **_key_heads_of_types(metadata, types, shared),
        **(_experts_beside_an_mlp(metadata) if has_experts else {}),
    }


def _has_wider_last_layers(metadata: Metadata, blocks: int, shared: int) -> bool:
    """Whether the layers that use other layers' keys have MLPs of twice the width."""
    widths = metadata.counts_by_layer("feed_forward_length")
    first, last = set(widths[: blocks - shared]), set(widths[blocks - shared :])
    width = min(widths)
    if shared >= blocks or first != {width} or last not in (set(), {width}, {2 * width}):
        raise UnsupportedModelError(
            f"{metadata.header.path} has MLPs of the widths {list(widths)}, {shared} layers without keys; "
            "transformers has no setting for that"
        )
    return last == {2 * width}


def _proportional_rope(metadata: Metadata, head_size: int) -> dict[str, Any]:
    """The rotation of the layers without a window: of some pairs of a head, with a pair's usual frequency."""
    divisors = float32_tensor(metadata, "rope_freqs.weight", head_size // 2)
    turning = int((divisors == 1.0).sum())
    if (divisors[:turning] != 1.0).any() or (divisors[turning:] < 1e20).any():
        raise UnsupportedModelError(
            f"{metadata.header.path} must divide the frequencies of the first pairs of values by 1 and those "
            "of the others by a very large number; transformers has no setting for others"
        )
    return {
        "rope_type": "proportional",
        "rope_theta": metadata.number("rope.freq_base", 1e4),
        "partial_rotary_factor": 2 * turning / head_size,
    }


def _key_heads_of_types(metadata: Metadata, types: list[str], shared: int) -> dict[str, Any]:
    """The numbers of key heads of layers with and without a window, and whether the latter have values."""
    heads = metadata.counts_by_layer("attention.head_count_kv")
    by_type = {kind: {heads[i] for i, own in enumerate(types) if own == kind} for kind in set(types)}
    full = [i for i, kind in enumerate(types[: len(types) - shared]) if kind == "full_attention"]
    have_values = {f"blk.{i}.attn_v.weight" in metadata.tensors for i in full}
    windowed, whole = (by_type.get(kind, set()) for kind in ("sliding_attention", "full_attention"))
    values_are_keys = have_values == {False}
    is_known = values_are_keys or not windowed or whole == windowed
    if max(len(windowed), len(whole), len(have_values)) > 1 or not whole or not is_known:
        raise UnsupportedModelError(
            f"{metadata.header.path} has layers with {some_of(map(str, sorted(set(heads))))} key heads; "
            "transformers has no setting for their places"
        )
    return {
        "num_key_value_heads": min(windowed or whole),
        "num_global_key_value_heads": min(whole),
        "attention_k_eq_v": values_are_keys,
    }


def _experts_beside_an_mlp(metadata: Metadata) -> dict[str, Any]:
    experts = experts_fields(metadata, "num_experts", normalized=True)
    used = experts.pop("num_experts_per_tok")
    width = expert_shape(metadata)[1]
    return experts | {"enable_moe_block": True, "top_k_experts": used, "moe_intermediate_size": width}


def _layer_types(metadata: Metadata, blocks: int, pattern: int) -> list[str]:
    """The kind of attention of each layer; all but each n-th see only a window of the text."""
    every = metadata.window_pattern(pattern)
    if isinstance(every, int):
        windowed = [every == 0 or (layer + 1) % every > 0 for layer in range(blocks)]
    else:
        windowed = list(every)
    if len(windowed) != blocks:
        raise CorruptModelError(
            f"{metadata.header.path} is corrupt: its sliding_window_pattern has {len(windowed):,} entries "
            f"for {blocks:,} blocks"
        )
    return ["sliding_attention" if use else "full_attention" for use in windowed]


def _query_scale(metadata: Metadata, fields: dict[str, Any], blocks_of_27b: int) -> int:
    """The number by whose root the scores of the attention are divided.

    No key has it. It is the size of a head, but for the 27B model, which llama.cpp also recognises by its
    number of blocks only.
    """
    if metadata.size("block_count") != blocks_of_27b:
        return int(fields["head_dim"])
    return metadata.size("embedding_length") // metadata.size("attention.head_count")


def _olmoe(metadata: Metadata, _fields: dict[str, Any]) -> dict[str, Any]:
    return experts_fields(metadata, "num_experts", normalized=False) | {
        "intermediate_size": expert_shape(metadata)[1],
    }


def _qwen2moe(metadata: Metadata, _fields: dict[str, Any]) -> dict[str, Any]:
    return _experts_with_a_shared_one(metadata, normalized=False)


def _experts_with_a_shared_one(metadata: Metadata, *, normalized: bool) -> dict[str, Any]:
    shared = metadata.shape("blk.0.ffn_up_shexp.weight", 2)[0]
    if metadata.size("expert_shared_feed_forward_length", shared) != shared:
        raise CorruptModelError(f"{metadata.header.path} is corrupt: its shared expert is {shared:,} wide")
    return experts_fields(metadata, "num_experts", normalized=normalized) | {
        "moe_intermediate_size": expert_shape(metadata)[1],
        "shared_expert_intermediate_size": shared,
    }


def _qwen3moe(metadata: Metadata, _fields: dict[str, Any]) -> dict[str, Any]:
    return experts_fields(metadata, "num_experts", normalized=True) | {
        "moe_intermediate_size": expert_shape(metadata)[1],
        "norm_topk_prob": True,  # as llama.cpp computes it
    }


def _qwen3next(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    return _experts_with_a_shared_one(metadata, normalized=True) | {
        "norm_topk_prob": True,  # as llama.cpp computes it
        **_delta_rules(metadata, fields),
    }


def _qwen35(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    rope, sections = fields["rope_parameters"], _position_sections(metadata, fields)
    rope = rope | {"mrope_section": sections, "mrope_interleaved": True}
    return {"rope_parameters": rope, **_delta_rules(metadata, fields)}


def _qwen35moe(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    return _experts_with_a_shared_one(metadata, normalized=True) | _qwen35(metadata, fields)


def _delta_rules(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    """The layers with a gated delta rule in place of attention, and the heads of these rules."""
    path, name = metadata.header.path, metadata.header.architecture
    keys, values = metadata.size("ssm.group_count"), metadata.size("ssm.time_step_rank")
    width = metadata.size("ssm.inner_size")
    if values % keys or width % values:
        raise CorruptModelError(
            f"{path} is corrupt: {name}.ssm.time_step_rank must be a multiple of {name}.ssm.group_count, and "
            f"{name}.ssm.inner_size of it; they are {values:,}, {keys:,} and {width:,}"
        )
    every = metadata.size("full_attention_interval", 4)
    is_recurrent = metadata.flags_by_layer("attention.recurrent_layers")
    layers = range(fields["num_hidden_layers"])
    if is_recurrent is None:
        is_recurrent = tuple((layer + 1) % every > 0 for layer in layers)
    return {
        "layer_types": ["linear_attention" if is_recurrent[layer] else "full_attention" for layer in layers],
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": metadata.size("ssm.state_size"),
        "linear_value_head_dim": width // values,
        "linear_conv_kernel_dim": metadata.size("ssm.conv_kernel"),
    }


def _position_sections(metadata: Metadata, fields: dict[str, Any]) -> list[int]:
    """How many pairs of rotated values follow a position in time, height and width; in a text, all are equal.

    llama.cpp would not rotate pairs that belong to none of the three.
    """
    sections = metadata.counts("rope.dimension_sections")
    turns = round(fields["head_dim"] * fields["rope_parameters"]["partial_rotary_factor"]) // 2
    total = sum(sections)
    is_usable = len(sections) in (3, 4) and total > 0
    if not is_usable or any(pair % total >= 3 * sections[pair % total % 3] for pair in range(turns)):
        raise UnsupportedModelError(
            f"{metadata.header.path} sets {metadata.header.architecture}.rope.dimension_sections to "
            f"{list(sections)}, but transformers' model rotates {turns} pairs of values"
        )
    return list(sections[:3])


def _gpt_oss(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    rope = fields["rope_parameters"]
    if rope["rope_type"] == "yarn":  # as the model was trained; llama.cpp rounds the limits to whole pairs
        rope = rope | {"truncate": False}
    return experts_fields(metadata, "num_local_experts", normalized=False, gating=3) | {
        "intermediate_size": expert_shape(metadata)[1],
        "rope_parameters": rope,
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": _layer_types(metadata, fields["num_hidden_layers"], pattern=2),
        "swiglu_alpha": 1.702,  # as llama.cpp computes it
        "swiglu_limit": 7.0,
    }


def _phi3(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "original_max_position_embeddings": metadata.size(
            "rope.scaling.original_context_length", fields["max_position_embeddings"]
        ),
        "sliding_window": metadata.size_or_none("attention.sliding_window"),
    }


def _lfm2moe(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    dense, sigmoid = metadata.size_or_none("leading_dense_block_count") or 0, 2
    metadata.size("expert_gating_func")  # llama.cpp has no default for it
    metadata.refuse_unless("expert_gating_func", sigmoid)
    return _lfm2(metadata, fields) | {
        **experts_fields(metadata, "num_experts", normalized=True, gating=sigmoid, block=dense),
        "moe_intermediate_size": expert_shape(metadata, dense)[1],
        "num_dense_layers": dense,
        "norm_topk_prob": True,  # as llama.cpp computes it
        "routed_scaling_factor": metadata.number_or_none("expert_weights_scale") or 1.0,
        "use_expert_bias": True,
    }


def _lfm2(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    metadata.refuse_unless("attention.sliding_window", 0)
    heads = metadata.counts_by_layer("attention.head_count_kv")
    if set(heads) - {0} != {fields["num_key_value_heads"]}:
        raise UnsupportedModelError(
            f"{metadata.header.path} has layers with {some_of(map(str, set(heads)))} key heads, but a "
            f"{metadata.header.architecture} model in transformers has no setting for that"
        )
    return {
        "norm_eps": fields["rms_norm_eps"],
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": metadata.size("shortconv.l_cache"),
        "conv_bias": False,  # as llama.cpp computes it
        "block_auto_adjust_ff_dim": False,  # the file has the width itself
    }


def _stablelm(metadata: Metadata, _fields: dict[str, Any]) -> dict[str, Any]:
    parallel = metadata.flag("use_parallel_residual", not has_tensor(metadata, ".ffn_norm.weight"))
    return {"use_parallel_residual": parallel}


def _gpt2(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["num_attention_heads"]
    if fields["num_key_value_heads"] != heads:
        raise UnsupportedModelError(
            f"{metadata.header.path} shares keys between heads, which transformers' GPT-2 model does not "
            "support"
        )
    return {
        "n_positions": fields["max_position_embeddings"],
        "n_embd": fields["hidden_size"],
        "n_layer": fields["num_hidden_layers"],
        "n_head": heads,
        "n_inner": fields["intermediate_size"],
    }


_ATTENTION_BIAS = {"attention_bias": ".attn_q.bias"}

_WITH_DELTA_RULES: dict[str, Any] = {
    "tensor_flags": _ATTENTION_BIAS,
    "partial_rotary": True,
    "norms_plus_one": True,
    "has_prediction_layers": True,
}

ARCHITECTURES = {
    "gemma": Architecture("gemma", norms_plus_one=True),
    "gemma2": Architecture("gemma2", more=_gemma2, norms_plus_one=True),
    "gemma3": Architecture("gemma3_text", more=_gemma3, norms_plus_one=True),
    "gemma4": Architecture(
        "gemma4_text", rotary=False, key_heads_by_layer=True, widths_by_layer=True, more=_gemma4
    ),
    "gpt2": Architecture(
        "gpt2",
        layer_norm="layer_norm_epsilon",
        has_head_dim=False,
        rotary=False,
        more=_gpt2,
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
    "gpt-oss": Architecture("gpt_oss", tensor_flags=_ATTENTION_BIAS, more=_gpt_oss, turned_experts=True),
    "lfm2": Architecture("lfm2", has_head_dim=False, key_heads_by_layer=True, more=_lfm2),
    "lfm2moe": Architecture("lfm2_moe", has_head_dim=False, key_heads_by_layer=True, more=_lfm2moe),
    "llama": Architecture("llama", more=_llama, rotary_rows_interleaved=True),
    "nemotron": Architecture(
        "nemotron",
        layer_norm="norm_eps",
        partial_rotary=True,
        tensor_flags=_ATTENTION_BIAS | {"mlp_bias": ".ffn_up.bias"},
        norms_plus_one=True,
    ),
    "olmoe": Architecture("olmoe", has_head_dim=False, more=_olmoe),
    "phi3": Architecture("phi3", has_head_dim=False, partial_rotary=True, more=_phi3),
    "qwen2": Architecture("qwen2", has_head_dim=False),
    "qwen2moe": Architecture("qwen2_moe", has_head_dim=False, more=_qwen2moe),
    "qwen3": Architecture("qwen3", tensor_flags=_ATTENTION_BIAS),
    "qwen35": Architecture("qwen3_5_text", more=_qwen35, tiled_value_heads=True, **_WITH_DELTA_RULES),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", more=_qwen35moe, tiled_value_heads=True, **_WITH_DELTA_RULES
    ),
    "qwen3moe": Architecture("qwen3_moe", tensor_flags=_ATTENTION_BIAS, more=_qwen3moe),
    "qwen3next": Architecture("qwen3_next", more=_qwen3next, **_WITH_DELTA_RULES),
    "stablelm": Architecture(
        "stablelm",
        layer_norm="layer_norm_eps",
        has_head_dim=False,
        partial_rotary=True,
        tensor_flags={"use_qkv_bias": ".attn_q.bias", "qk_layernorm": ".attn_q_norm.weight"},
        more=_stablelm,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        layer_norm="norm_epsilon",
        has_head_dim=False,
        tensor_flags={"use_bias": ".attn_q.bias"},
    ),
}
"""llama.cpp's name of each architecture that can be converted."""
