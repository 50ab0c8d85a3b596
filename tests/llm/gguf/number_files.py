"""Tiny GGUF models whose keys change their numbers, to compare their logits with llama.cpp's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from vocabulary_files import byte_level_keys

TOKENS = [0, *((37 * at) % 250 + 5 for at in range(39))]
COMPARED = 12
"""How many logits of the last token are recorded."""

_WIDTH, _HEADS, _KEY_HEADS, _INNER = 32, 4, 2, 64
_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}
_LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
_ATTENTION = {"rope.scaling.attn_factor": 1.3}
_FREQUENCIES = {"rope_freqs.weight": [1.0, 1.5, 3.0, 8.0]}
_TWO_LISTS = {
    "rope_factors_short.weight": [1.0, 1.5, 2.0, 2.5],
    "rope_factors_long.weight": [2.0, 3.0, 4.0, 5.0],
}
_LONG = {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 16}
_EVERY_SECOND = {"attention.sliding_window": 5, "attention.sliding_window_pattern": 2}

# The architecture, the keys, and then the tensors, head size and number of blocks if they are not usual.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama, linear": ("llama", _LINEAR, {}),
    "llama, YaRN": ("llama", _YARN, {}),
    "llama, YaRN without the original length": (
        "llama",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
        {},
    ),
    "llama, a factor without a method": ("llama", {"rope.scaling.factor": 4.0}, {}),
    "llama, a factor by its old key": ("llama", {"rope.scale_linear": 4.0}, {}),
    "llama, a factor and no method": ("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}),
    "llama, attention factor": ("llama", _ATTENTION, {}),
    "llama, linear and attention factor": ("llama", _LINEAR | _ATTENTION, {}),
    "llama, YaRN and attention factor": ("llama", _YARN | _ATTENTION, {}),
    "llama, frequencies": ("llama", {}, {"tensors": _FREQUENCIES}),
    "llama, frequencies and linear": ("llama", _LINEAR, {"tensors": _FREQUENCIES}),
    "llama, frequencies and YaRN": ("llama", _YARN, {"tensors": _FREQUENCIES}),
    "llama, frequencies and attention factor": ("llama", _ATTENTION, {"tensors": _FREQUENCIES}),
    "llama, two lists": ("llama", _LONG, {"tensors": _TWO_LISTS}),
    "llama, two lists and a factor": ("llama", _LONG | {"rope.scaling.factor": 2.0}, {"tensors": _TWO_LISTS}),
    "qwen3, attention factor": ("qwen3", _ATTENTION, {}),
    "gemma2, heads of 8": ("gemma2", {"attention.sliding_window": 5}, {}),
    "gemma2, heads of 32": ("gemma2", {}, {"head": 32}),
    "gemma2, 46 blocks": ("gemma2", {}, {"blocks": 46, "head": 16}),
    "gemma2, windows by layer": (
        "gemma2",
        {"attention.sliding_window": 5, "attention.sliding_window_pattern": [False, True]},
        {},
    ),
    "gemma3, heads of 8": ("gemma3", {"attention.sliding_window": 5}, {}),
    "gemma3, heads of 32": ("gemma3", {"attention.sliding_window": 5}, {"head": 32}),
    "gemma3, 62 blocks": ("gemma3", {"attention.sliding_window": 5}, {"blocks": 62, "head": 16}),
    "gemma3, no window": ("gemma3", {"rope.freq_base": 500.0}, {}),
    "gemma3, a window of 0": ("gemma3", {"rope.freq_base": 500.0, "attention.sliding_window": 0}, {}),
    "gemma3, linear": ("gemma3", _EVERY_SECOND | _LINEAR, {}),
    "gemma3, YaRN": ("gemma3", _EVERY_SECOND | _YARN, {}),
    "gemma3, windows in all layers": (
        "gemma3",
        {"rope.freq_base": 500.0, "attention.sliding_window": 5, "attention.sliding_window_pattern": 0},
        {"blocks": 6},
    ),
    "gemma3, cap": ("gemma3", _EVERY_SECOND | {"final_logit_softcapping": 2.0}, {}),
}


def write_numbers_file(path: Path, name: str) -> Path:
    """The GGUF file of a case; its values are the same on each machine."""
    architecture, changes, sizes = CASES[name]
    head, blocks = sizes.get("head", 8), sizes.get("blocks", 2)
    keys: dict[str, Any] = {
        "context_length": 64,
        "embedding_length": _WIDTH,
        "block_count": blocks,
        "feed_forward_length": _INNER,
        "attention.head_count": _HEADS,
        "attention.head_count_kv": _KEY_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": head,
    }
    vocabulary = byte_level_keys("qwen2", ["<s>", "</s>"], 20)
    rows = len(vocabulary["tokenizer.ggml.tokens"])
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (
        {f"{architecture}.{key}": value for key, value in (keys | changes).items()} | vocabulary
    ).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for number, (tensor, shape) in enumerate(_shapes(architecture, rows, head, blocks)):
        waves = np.sin(1.7 * np.arange(int(np.prod(shape))) + 0.1 * number**2).reshape(shape)
        values = 1 + 0.2 * waves if len(shape) == 1 else 0.3 * waves
        writer.add_tensor(tensor, values.astype(np.float32))
    for tensor, factors in sizes.get("tensors", {}).items():
        writer.add_tensor(tensor, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(architecture: str, rows: int, head: int, blocks: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (rows, _WIDTH)
    yield "output_norm.weight", (_WIDTH,)
    block: dict[str, tuple[int, ...]] = {
        "attn_norm": (_WIDTH,),
        "attn_q": (_HEADS * head, _WIDTH),
        "attn_k": (_KEY_HEADS * head, _WIDTH),
        "attn_v": (_KEY_HEADS * head, _WIDTH),
        "attn_output": (_WIDTH, _HEADS * head),
        "ffn_norm": (_WIDTH,),
        "ffn_gate": (_INNER, _WIDTH),
        "ffn_up": (_INNER, _WIDTH),
        "ffn_down": (_WIDTH, _INNER),
    }
    if architecture in ("gemma2", "gemma3"):
        block |= {"post_attention_norm": (_WIDTH,), "post_ffw_norm": (_WIDTH,)}
    if architecture in ("gemma3", "qwen3"):
        block |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
    for number in range(blocks):
        for part, shape in block.items():
            yield f"blk.{number}.{part}.weight", shape
