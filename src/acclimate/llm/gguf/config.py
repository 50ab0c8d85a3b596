"""Builds a transformers config from the keys and tensors of a GGUF file.

transformers' own reader uses some keys, and leaves the others at the defaults of its config classes, which
are the values of one checkpoint. A file with another rotary width, window or scaling then loads, but
generates nonsense. Here keys of the architecture become fields of the config, and
``metadata.py`` refuses by name a key that was not read, unless it has no effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from acclimate.errors import CorruptModelError, UnsupportedModelError
from acclimate.llm.gguf.header import GGUFHeader, block_number
from acclimate.llm.gguf.metadata import Metadata


@dataclass(frozen=True)
class Architecture:
    """How files of one llama.cpp architecture become a transformers model."""

    model_type: str
    """The model type in transformers' config."""
    layer_norm: str | None = None
    """The config's field for the epsilon of layer norms; ``None``: RMS norms, in ``rms_norm_eps``."""
    has_head_dim: bool = True
    """Whether the config has a ``head_dim``; if not, a head is always hidden size / heads wide."""
    rotary: bool = True
    partial_rotary: bool = False
    """Whether the model can rotate only a part of each head."""
    key_heads_by_layer: bool = False
    """Whether layers can have different numbers of key heads."""
    widths_by_layer: bool = False
    """Whether layers can have MLPs of different widths."""
    tensor_flags: Mapping[str, str] = field(default_factory=dict)
    """Fields that are true if the file has tensors with this ending."""
    more: Callable[[Metadata, dict[str, Any]], dict[str, Any]] | None = None
    """Returns further fields, given those so far."""
    norms_plus_one: bool = False
    """Whether llama.cpp stores 1 + weight for each norm."""
    rotary_rows_interleaved: bool = False
    """Whether llama.cpp interleaves the two halves of each head that the rotary embedding mixes."""
    transposed: frozenset[str] = frozenset()
    """The parts of a block whose weights transformers stores as (inputs, outputs)."""
    has_prediction_layers: bool = False
    """Whether the last blocks can be layers that predict further tokens, which a text does without."""
    tiled_value_heads: bool = False
    """Whether llama.cpp stores the value heads of a gated delta rule with a head of each group in turn."""
    turned_experts: bool = False
    """Whether transformers stores experts' weights as (inputs, outputs), with gates and ups in turns."""


def config_fields(header: GGUFHeader, architecture: Architecture) -> dict[str, Any]:
    """Returns the fields of the model's config; no size in them exceeds the size of the file's tensors.

    Raises:
        CorruptModelError: a key is missing or has an impossible value.
        UnsupportedModelError: a key asks for something that transformers' model cannot do.
    """
    metadata = Metadata(header)
    metadata.refuse_unless("attention.causal", True)
    blocks = metadata.size("block_count")
    found = {block_number(name) for name in metadata.tensors} - {None}
    if found != set(range(min(blocks, len(found) + 1))):
        raise CorruptModelError(
            f"{header.path} is corrupt: its header says {blocks:,} blocks, but it has tensors for "
            f"{len(found):,}"
        )
    rows, width = metadata.shape("token_embd.weight", 2)
    if width != metadata.size("embedding_length"):
        raise CorruptModelError(
            f"{header.path} is corrupt: tensor 'token_embd.weight' has {width:,} columns, but its model "
            f"needs {metadata.size('embedding_length'):,}"
        )
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if tokens is None or tokens.array_length is None:
        raise CorruptModelError(f"{header.path} holds no vocabulary: it lacks the key tokenizer.ggml.tokens")
    if tokens.array_length > rows:
        raise CorruptModelError(
            f"{header.path} is corrupt: its vocabulary has {tokens.array_length:,} tokens, "
            f"its embedding {rows:,} rows"
        )
    named = {"_model_name_or_path": header.value("general.name"), "unk_token_id": metadata.token("unknown")}
    fields = {
        **{name: value for name, value in named.items() if value is not None},
        "vocab_size": rows,
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "bos_token_id": metadata.token("bos"),
        "eos_token_id": metadata.token("eos"),
        "pad_token_id": metadata.token("padding"),
        **_architecture_fields(metadata, architecture),
    }
    metadata.refuse_unread()
    return fields


# -- fields of all architectures ------------------------------------------------------------------------


def _architecture_fields(metadata: Metadata, architecture: Architecture) -> dict[str, Any]:
    heads, norm = metadata.size("attention.head_count"), architecture.layer_norm
    head_size = _head_size(metadata, free=architecture.has_head_dim)
    by_layer = metadata.counts_by_layer("attention.head_count_kv") if architecture.key_heads_by_layer else ()
    widths = metadata.counts_by_layer("feed_forward_length") if architecture.widths_by_layer else ()
    fields: dict[str, Any] = {
        "model_type": architecture.model_type,
        "max_position_embeddings": metadata.size("context_length"),
        "hidden_size": metadata.size("embedding_length"),
        "num_hidden_layers": _layers(metadata, architecture),
        "intermediate_size": min(widths)
        if widths
        else metadata.size("feed_forward_length", _width_of_experts_alone(metadata)),
        "num_attention_heads": heads,
        "num_key_value_heads": max(by_layer) if by_layer else metadata.size("attention.head_count_kv", heads),
        norm or "rms_norm_eps": metadata.number(f"attention.layer_norm{'' if norm else '_rms'}_epsilon"),
        **{name: has_tensor(metadata, ending) for name, ending in architecture.tensor_flags.items()},
    }
    if architecture.has_head_dim:
        fields["head_dim"] = head_size
    if architecture.rotary:
        fields["rope_parameters"] = _rope(metadata, head_size, architecture)
    return fields | (architecture.more(metadata, fields) if architecture.more else {})


def _layers(metadata: Metadata, architecture: Architecture) -> int:
    """The number of layers that compute a text."""
    blocks = metadata.size("block_count")
    more = metadata.size_or_none("nextn_predict_layers") if architecture.has_prediction_layers else None
    if more is not None and more >= blocks:
        raise CorruptModelError(
            f"{metadata.header.path} is corrupt: {metadata.header.architecture}.nextn_predict_layers is "
            f"{more:,}, but it has {blocks:,} blocks"
        )
    return blocks - (more or 0)


def _head_size(metadata: Metadata, *, free: bool) -> int:
    """The width of an attention head; any width is accepted if ``free``."""
    width, heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    if width < heads:
        raise CorruptModelError(
            f"{metadata.header.path} is corrupt: it divides a width of {width:,} into {heads:,} heads"
        )
    size = metadata.size("attention.key_length", width // heads)
    value_size = metadata.size("attention.value_length", size)
    if value_size != size or not (free or size == width // heads):
        raise UnsupportedModelError(
            f"{metadata.header.path} has attention heads of {size} for keys and {value_size} for values, "
            f"but a {metadata.header.architecture} model in transformers has no setting for that"
        )
    return size


def _rope(metadata: Metadata, head_size: int, architecture: Architecture) -> dict[str, Any]:
    """The rotary embedding: its base, its width and how it is scaled to longer contexts."""
    partial = architecture.partial_rotary
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", 1e4)}
    rotated = metadata.size("rope.dimension_count", head_size)
    if partial:
        rope["partial_rotary_factor"] = rotated / head_size
    if rotated % 2 or (rotated != head_size and not (partial and rotated < head_size)):
        raise UnsupportedModelError(
            f"{metadata.header.path} rotates {rotated} of the {head_size} values of each head, "
            f"but a {metadata.header.architecture} model in transformers has no setting for that"
        )
    return rope | _scaling(metadata, rotated, rope["rope_theta"])


def _scaling(metadata: Metadata, rotated: int, base: float) -> dict[str, Any]:
    """How the rotary embedding is scaled: the file's method, its lists of divisors, or both."""
    import numpy as np

    method = metadata.text("rope.scaling.type", "linear")
    # The second is the older name.
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    amplitude = metadata.number("rope.scaling.attn_factor", 1.0)
    original = metadata.size("rope.scaling.original_context_length", metadata.size("context_length"))
    fast = metadata.number("rope.scaling.yarn_beta_fast", 32.0)
    slow = metadata.number("rope.scaling.yarn_beta_slow", 1.0)
    metadata.refuse_unless("rope.scaling.yarn_ext_factor", 1)
    metadata.refuse_unless("rope.scaling.yarn_attn_factor", 1)
    if method == "yarn":
        amplitude *= 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    elif method not in ("none", "linear", "longrope"):
        raise UnsupportedModelError(
            f"{metadata.header.path} scales its context by the method {method!r}, which cannot be converted"
        )
    short, long = _rope_factors(metadata, rotated)
    if short is None and method == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": fast,
            "beta_slow": slow,
            "attention_factor": amplitude,
        }
    if short is None and amplitude == 1 and (method == "none" or factor == 1):
        return {}
    if short is None and amplitude == 1:
        return {"rope_type": "linear", "factor": factor}
    # Any other combination becomes two lists of divisors, into which the method's own are multiplied.
    divisors = np.ones(rotated // 2)
    if method == "yarn":
        kept = _share_kept_by_yarn(rotated, base, original, fast, slow)
        divisors = 1 / (kept + (1 - kept) / factor)
    elif method != "none":
        divisors *= factor
    return {
        "rope_type": "longrope",
        "short_factor": (divisors * (1.0 if short is None else short)).tolist(),
        "long_factor": (divisors * (1.0 if long is None else long)).tolist(),
        "attention_factor": amplitude,
        "original_max_position_embeddings": original,
    }


def _share_kept_by_yarn(rotated: int, base: float, original: int, fast: float, slow: float) -> Any:
    """For each pair of values, how much of its frequency YaRN does not divide by the factor."""
    import numpy as np

    def pair_that_turns(times: float) -> float:
        return rotated * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(fast)), 0)
    high = min(math.ceil(pair_that_turns(slow)), rotated - 1)
    return 1 - np.clip((np.arange(rotated // 2) - low) / max(high - low, 0.001), 0, 1)


def _rope_factors(metadata: Metadata, rotated: int) -> tuple[Any | None, Any | None]:
    """The divisors of the frequencies for short and for long contexts, if the file has them as tensors.

    Llama 3.1 and later have one list (``rope_freqs``), Phi 3 one for short and one for long contexts.
    """
    names = ("rope_factors_short.weight", "rope_factors_long.weight")
    if "rope_freqs.weight" in metadata.tensors:
        factors = float32_tensor(metadata, "rope_freqs.weight", rotated // 2)
        return factors, factors
    if not any(name in metadata.tensors for name in names):
        return None, None
    short, long = (float32_tensor(metadata, name, rotated // 2) for name in names)
    return short, long


def float32_tensor(metadata: Metadata, name: str, count: int) -> Any:
    """Returns a tensor of so many numbers above 0, as an array of float64.

    Raises:
        CorruptModelError: it has another size or type, or a number that is not above 0.
    """
    import numpy as np

    header, shape = metadata.header, metadata.shape(name, 1)
    tensor = metadata.tensors[name]
    if shape != (count,) or tensor.ggml_type != 0:
        raise CorruptModelError(
            f"{header.path} is corrupt: tensor {name!r} must hold {count} values of float32; it holds "
            f"{shape[0]:,} of ggml type {tensor.ggml_type}"
        )
    values = np.fromfile(header.path, "<f4", count, offset=header.data_start + tensor.offset)
    if len(values) != count or not np.all(np.isfinite(values) & (values > 0)):
        raise CorruptModelError(f"{header.path} is corrupt: tensor {name!r} must hold numbers above 0")
    return values.astype(np.float64)


def has_tensor(metadata: Metadata, ending: str) -> bool:
    """Whether a block has a tensor whose name ends so."""
    return any(name.startswith("blk.") and name.endswith(ending) for name in metadata.tensors)


def expert_shape(metadata: Metadata, block: int = 0) -> tuple[int, int]:
    """The number of experts in a block, and their width."""
    joined = f"blk.{block}.ffn_gate_up_exps.weight"
    if joined in metadata.tensors:
        count, both, _ = metadata.shape(joined, 3)
        return count, both // 2
    count, width, _ = metadata.shape(f"blk.{block}.ffn_up_exps.weight", 3)
    return count, width


def _width_of_experts_alone(metadata: Metadata) -> int | None:
    """The width of the experts of a model that has no other MLP; ``None`` for other models."""
    return (
        expert_shape(metadata)[1]
        if has_tensor(metadata, "_exps.weight") and not has_tensor(metadata, ".ffn_up.weight")
        else None
    )


def experts_fields(
    metadata: Metadata, count_field: str, *, normalized: bool, gating: int = 1, block: int = 0
) -> dict[str, Any]:
    """The fields of a mixture of experts, with their widths taken from the tensors.

    Args:
        metadata: the file's keys.
        count_field: the config's field for the number of experts.
        normalized: whether the weights of the experts used for a token are divided by their sum.
        gating: how weights are made of the router's logits, as llama.cpp numbers it. 1: softmax; 2: sigmoid;
            3: softmax of the experts used.
        block: the first block with experts.
    """
    count, width = expert_shape(metadata, block)
    used = metadata.size("expert_used_count")
    if count != metadata.size("expert_count") or used > count:
        raise CorruptModelError(
            f"{metadata.header.path} is corrupt: it holds {count} experts, but its header says "
            f"{metadata.size('expert_count'):,}, with {used:,} used for each token"
        )
    if metadata.size("expert_feed_forward_length", width) != width:
        raise CorruptModelError(f"{metadata.header.path} is corrupt: its experts are {width:,} wide")
    metadata.refuse_unless("expert_weights_norm", normalized)
    metadata.refuse_unless("expert_gating_func", 0, gating)  # 0: the architecture's
    return {count_field: count, "num_experts_per_tok": used}
