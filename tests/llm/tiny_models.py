"""Tiny models and GGUF files, with random weights and a vocabulary of a few hundred tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CONTEXT = 64
TEXT = ["The capital of France is Paris. Ünïcödé, 日本語, emoji 🤦🏽 and a few more words to merge. "] * 4


def byte_level_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE: any text can be encoded, and one character can take several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def config(kind: str, vocabulary: int) -> Any:
    shape = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "initializer_range": 0.5,
    }
    if kind == "gpt2":
        return transformers.GPT2Config(
            vocab_size=vocabulary,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=CONTEXT,
            bos_token_id=0,
            eos_token_id=1,
        )
    kinds = {
        "llama": transformers.LlamaConfig,
        "gemma2": transformers.Gemma2Config,
        "gemma3": transformers.Gemma3TextConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }
    return kinds[kind](**shape, **({"head_dim": 8} if kind != "qwen2" else {}))


def save_tiny_model(kind: str, folder: Path, shard_size: str = "1GB") -> Path:
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(kind, len(tokenizer)))
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


# -- GGUF ----------------------------------------------------------------------------------------

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types as llama.cpp writes them, complete under merging."""
    pieces = [*"▁abcdefghijklmnopqrstuvwxyzTPF.,é日", "  "]
    pieces += [
        "▁c",
        "ap",
        "▁cap",
        "it",
        "al",
        "ital",
        "▁capital",
        "▁o",
        "▁of",
        "▁T",
        "▁Th",
        "▁The",
        "is",
        "▁is",
    ]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *_BYTES, *pieces]
    kinds = [3, 3, 3, 2, 3] + [6] * len(_BYTES) + [4 if piece == "  " else 1 for piece in pieces]
    scores = [0.0] * (5 + len(_BYTES)) + [-float(index) for index in range(len(pieces))]
    return tokens, scores, kinds


def write_tiny_gguf(
    kind: str, path: Path, quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0
) -> Path:
    """A GGUF file as llama.cpp's converter makes it, with random tensors."""
    head = _head_size(kind)
    writer = gguf.GGUFWriter(path, kind)
    writer.add_name(f"tiny {kind}")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_sliding_window(16)
    tokens, scores, kinds = sentencepiece_vocabulary()
    if kind.startswith("qwen"):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        byte_level = byte_level_tokenizer()
        names = byte_level.convert_ids_to_tokens(range(len(byte_level)))
        writer.add_token_list(names)
        writer.add_token_types([3, 3] + [1] * (len(names) - 2))
        merges = json.loads(byte_level.backend_tokenizer.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(merge) for merge in merges])
        writer.add_bos_token_id(0)
        tokens = names
    else:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        writer.add_bos_token_id(2)
        writer.add_unk_token_id(3)
        writer.add_pad_token_id(0)
        writer.add_add_bos_token(True)
        writer.add_add_space_prefix(False)
    writer.add_eos_token_id(1)
    random = np.random.default_rng(0)
    for name, shape in _tensors(kind, len(tokens)).items():
        values = random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1 or shape[-1] % 32:
            writer.add_tensor(name, values)
        else:
            packed = gguf.quantize(values, quantization)
            writer.add_tensor(name, packed, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _head_size(kind: str) -> int:
    return 128 if kind == "qwen3" else 8  # transformers reads no other size from a Qwen 3 file


def _tensors(kind: str, vocabulary: int) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, 32), "output_norm.weight": (32,)}
    head = _head_size(kind)
    for layer in range(2):
        block = {
            "attn_norm.weight": (32,),
            "attn_q.weight": (4 * head, 32),
            "attn_k.weight": (2 * head, 32),
            "attn_v.weight": (2 * head, 32),
            "attn_output.weight": (32, 4 * head),
            "ffn_norm.weight": (32,),
            "ffn_gate.weight": (64, 32),
            "ffn_up.weight": (64, 32),
            "ffn_down.weight": (32, 64),
        }
        if kind in {"gemma2", "gemma3"}:
            block |= {"post_attention_norm.weight": (32,), "post_ffw_norm.weight": (32,)}
        if kind in {"gemma3", "qwen3"}:
            block |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
        if kind == "qwen2":
            block |= {"attn_q.bias": (32,), "attn_k.bias": (16,), "attn_v.bias": (16,)}
        tensors |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    if kind in {"llama", "qwen3"}:
        tensors["output.weight"] = (vocabulary, 32)
    return tensors
