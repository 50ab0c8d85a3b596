"""GGUF files of random weights in the shapes of published models, for benchmarks.

The rows of a matrix have different lengths: weights are not flat, and quantisation has something to do.
A file is made once, in the temporary folder, from a fixed seed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder-only model, in GGUF's terms."""

    architecture: str
    words: int
    width: int
    layers: int
    heads: int
    key_value_heads: int
    head: int
    """The width of an attention head."""
    hidden: int
    """The width of a feed-forward block, or of one expert."""
    experts: int = 0
    used: int = 0
    """How many experts a token uses."""
    window: int = 0

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the names and shapes of all tensors; the output head is mostly the embedding."""
        yield "token_embd.weight", (self.words, self.width)
        if self.architecture == "olmoe":  # llama.cpp reads this tensor without looking whether it is there
            yield "output.weight", (self.words, self.width)
        yield "output_norm.weight", (self.width,)
        q, kv = self.heads * self.head, self.key_value_heads * self.head
        for layer in range(self.layers):
            of: dict[str, tuple[int, ...]] = {
                "attn_norm.weight": (self.width,),
                "ffn_norm.weight": (self.width,),
                "attn_q.weight": (q, self.width),
                "attn_k.weight": (kv, self.width),
                "attn_v.weight": (kv, self.width),
                "attn_output.weight": (self.width, q),
            }
            if self.architecture in ("qwen3", "qwen3moe", "gemma3"):
                of |= {"attn_q_norm.weight": (self.head,), "attn_k_norm.weight": (self.head,)}
            if self.architecture == "olmoe":
                of |= {"attn_q_norm.weight": (q,), "attn_k_norm.weight": (kv,)}
            if self.architecture == "gemma3":
                of |= {"post_attention_norm.weight": (self.width,), "post_ffw_norm.weight": (self.width,)}
            if self.architecture == "qwen2":
                of |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
            if self.experts:
                of |= {
                    "ffn_gate_inp.weight": (self.experts, self.width),
                    "ffn_gate_exps.weight": (self.experts, self.hidden, self.width),
                    "ffn_up_exps.weight": (self.experts, self.hidden, self.width),
                    "ffn_down_exps.weight": (self.experts, self.width, self.hidden),
                }
            else:
                of |= {
                    "ffn_gate.weight": (self.hidden, self.width),
                    "ffn_up.weight": (self.hidden, self.width),
                    "ffn_down.weight": (self.width, self.hidden),
                }
            for name, shape in of.items():
                yield f"blk.{layer}.{name}", shape


SHAPES = {
    "Qwen3-0.6B": Shape("qwen3", 151936, 1024, 28, 16, 8, 128, 3072),
    "Llama-3.2-1B": Shape("llama", 128256, 2048, 16, 32, 8, 64, 8192),
    "Gemma-3-1B": Shape("gemma3", 262144, 1152, 26, 4, 1, 256, 6912, window=512),
    "Qwen2.5-3B": Shape("qwen2", 151936, 2048, 36, 16, 2, 128, 11008),
    "SmolLM2-360M": Shape("llama", 49152, 960, 32, 15, 5, 64, 2560),
    "Qwen3-MoE, 3 layers": Shape("qwen3moe", 151936, 2048, 3, 32, 4, 128, 768, experts=128, used=8),
    "OLMoE, 4 layers": Shape("olmoe", 50304, 2048, 4, 16, 16, 128, 1024, experts=64, used=8),
    "64 experts, 8 used": Shape("qwen3moe", 2000, 512, 6, 8, 2, 64, 256, experts=64, used=8),
}


def file_of(name: str) -> Path:
    """Returns the file of a model in bfloat16, which is made first if it is missing."""
    shape = SHAPES[name]
    plain = "".join(c if c.isalnum() else "-" for c in name)
    path = Path(tempfile.gettempdir(), f"acclimate-benchmark-{os.getuid()}-{plain}-BF16.gguf")
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        _write(shape, name, part)
        part.replace(path)
    return path


def _write(shape: Shape, name: str, path: Path) -> None:
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(16384)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.key_value_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(shape.words)
    if shape.architecture == "llama":
        writer.add_rope_dimension_count(shape.head)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.hidden)
    if shape.window:
        writer.add_sliding_window(shape.window)
    _add_vocabulary(writer, shape.words)
    random = np.random.default_rng(0)
    pool = random.standard_normal(1 << 22, dtype=np.float32)
    for tensor, size in shape.tensors():
        if len(size) == 1:
            values = random.uniform(0.8, 1.2, size).astype(np.float32)
            writer.add_tensor(tensor, values if tensor.endswith("weight") else values - 1)
        else:
            writer.add_tensor(tensor, _matrix(pool, size, random), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _matrix(
    pool: NDArray[np.float32], size: tuple[int, ...], random: np.random.Generator
) -> NDArray[np.uint8]:
    """The bytes of a matrix in bfloat16, with rows of different lengths."""
    columns = size[-1]
    rows = int(np.prod(size[:-1]))
    lengths = np.exp(random.normal(0, 0.3, rows)).astype(np.float32) / columns**0.5
    made = np.empty((rows, columns), np.uint16)
    step = max(1, len(pool) // columns // 2)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        start = int(random.integers(0, len(pool) - count * columns))
        block = pool[start : start + count * columns].reshape(count, columns)
        scaled = block * lengths[first : first + count, None]
        made[first : first + count] = (scaled.view(np.uint32) + 0x8000) >> 16
    return made.view(np.uint8).reshape(*size[:-1], 2 * columns)


def _add_vocabulary(writer: gguf.GGUFWriter, words: int) -> None:
    """A vocabulary of bytes and of words that no text has."""
    # GPT-2's characters for bytes.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in letters)}
    tokens = ["<s>", "</s>", *letters.values(), "ab"]
    tokens += [f"<word {index}>" for index in range(words - len(tokens))]
    kinds = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (words - 2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
