"""A GGUF file of any architecture gives its source's model, or is refused by name before anything is made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import MODELS, Change, key, make_model, sentencepiece_keys, tensor, without, write_gguf
from safetensors.torch import load_file
from tiny_models import byte_level_tokenizer

from acclimate.errors import AcclimateError, CorruptModelError, UnsupportedModelError
from acclimate.llm import load_model
from acclimate.llm.gguf.architectures import ARCHITECTURES
from acclimate.llm.gguf.convert import converted_gguf
from quick_parameters import few_of, quick

TEXT = "The capital of France is Paris. Ünïcödé, 日本語 12345"


@pytest.mark.parametrize(
    "name",
    quick(
        tuple(MODELS),
        "gemma3",
        "gemma4-shared-keys",
        "gpt2",
        "gpt_oss",
        "lfm2_moe",
        "llama-yarn",
        "mixtral",
        "phi3-long",
        "qwen3_next",
        "qwen35_moe",
        "stablelm2",
    ),
)
def test_a_file_gives_the_weights_the_logits_and_the_tokens_of_its_source(name: str, tmp_path: Path) -> None:
    source = make_model(name)
    path = write_gguf(name, source, tmp_path / f"{name}.gguf")
    loaded = load_model(path, dtype="float32")
    expected, ours = source.state_dict(), loaded.module.state_dict()
    assert ours.keys() == expected.keys()
    for parameter, values in expected.items():
        torch.testing.assert_close(ours[parameter], values, rtol=0, atol=1e-6, msg=parameter)
    tokens = byte_level_tokenizer()(TEXT)["input_ids"]
    assert loaded.tokenizer.encode(TEXT) in (tokens, tokens[1:])  # the file need not ask for <s>
    ids = torch.tensor([(tokens * 2)[:40]])
    with torch.no_grad():
        torch.testing.assert_close(loaded.module(ids).logits, source(ids).logits, rtol=1e-4, atol=1e-4)


def test_each_architecture_that_is_promised_is_checked_against_its_source() -> None:
    from_transformers = {"qwen2"}  # in test_gguf_conversion.py
    assert {MODELS[name][0] for name in MODELS} | from_transformers >= set(ARCHITECTURES)


def test_the_page_names_each_architecture() -> None:
    page = (Path(__file__).parents[3] / "docs" / "inference.md").read_text()
    section = page.partition("## GGUF files")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall("`([^`]+)`", row)} - {"general.architecture"} == set(
        ARCHITECTURES
    )


def refusal(path: Path, error: type[AcclimateError]) -> str:
    with pytest.raises(error) as caught:
        converted_gguf(path, "float32")
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


@pytest.mark.parametrize("architecture", ["bloom", "falcon", "mamba", "t5", "made-up", "gemma3n"])
def test_another_architecture_is_refused_by_its_name(architecture: str, tmp_path: Path) -> None:
    def rename(keys: dict[str, Any], _tensors: dict[str, Any]) -> None:
        keys["general.architecture"] = architecture

    path = write_gguf("gpt2", make_model("gpt2"), tmp_path / "model.gguf", rename)
    assert repr(architecture) in refusal(path, UnsupportedModelError)


@pytest.mark.parametrize(
    ("name", "change", "word"),
    few_of(
        [
            ("qwen3", key("qwen3.attention.max_alibi_bias", 8.0), "attention.max_alibi_bias"),
            ("qwen3", key("qwen3.logit_scale", 0.5), "qwen3.logit_scale"),
            ("llama", key("llama.rope.scaling.type", "made-up"), "made-up"),
            ("llama", key("llama.rope.dimension_count", 4), "rotates 4"),
            ("qwen35", key("qwen35.rope.dimension_count", 7), "rotates 7"),
            ("llama", key("llama.attention.head_count_kv", [2, 2]), "head_count_kv"),
            ("gpt2", key("split.count", 3), "3 parts"),
            ("gpt2", key("general.type", "adapter"), "adapter"),
            ("gpt2", key("tokenizer.ggml.model", "bert"), "bert"),
            ("gpt2", key("tokenizer.ggml.pre", "made-up"), "made-up"),
            ("stablelm", tensor("blk.0.attn_sinks.weight", 4), "blk.0.attn_sinks.weight"),
            ("gemma4-shared-keys", key("gemma4.attention.head_count_kv", [2, 1, 2, 1]), "1, 2 key heads"),
            ("gemma4", key("gemma4.feed_forward_length", [64, 128]), "[64, 128]"),
            ("gemma4", tensor("rope_freqs.weight", 8, value=2.0), "frequencies"),
            ("gemma4", key("gemma4.rope.dimension_count_swa", 4), "rope.dimension_count_swa"),
        ],
        3,
    ),
)
def test_what_transformers_has_no_setting_for_is_refused_by_its_name(
    name: str, change: Change, word: str, tmp_path: Path
) -> None:
    path = write_gguf(name, make_model(name), tmp_path / "model.gguf", change)
    assert word in refusal(path, UnsupportedModelError)


@pytest.mark.parametrize(
    ("name", "change", "word"),
    few_of(
        [
            ("gpt2", without("blk.1.ffn_up.bias"), "blk.1.ffn_up.bias"),
            ("phi3", without("output_norm.weight"), "output_norm.weight"),
            ("mixtral", without("blk.1.ffn_gate_exps.weight"), "blk.1.ffn_gate_exps.weight"),
            ("stablelm2", without("blk.1.attn_k_norm.weight"), "blk.1.attn_k_norm.weight"),
            ("phi3-long", without("rope_factors_long.weight"), "rope_factors_long.weight"),
            ("gpt2", without("token_embd.weight"), "token_embd.weight"),
            ("gpt2", without("gpt2.context_length"), "gpt2.context_length"),
            ("gpt2", without("tokenizer.ggml.tokens"), "vocabulary"),
            ("gpt2", without("tokenizer.ggml.merges"), "merges"),
            ("gpt2", tensor("blk.0.ffn_up.bias", 7), "blk.0.ffn_up.bias"),
            ("mixtral", tensor("blk.0.ffn_up_exps.weight", 3, 64, 32), "3 experts"),
            ("mixtral", tensor("blk.1.ffn_up_exps.weight", 3, 64, 32), "blk.1.ffn_up_exps.weight"),
            ("stablelm2", tensor("blk.0.attn_q_norm.weight", 3, 8), "blk.0.attn_q_norm.weight"),
            ("gpt2", key("gpt2.attention.head_count", 1 << 31), "heads"),
            ("gpt2", key("gpt2.attention.head_count", "four"), "head_count"),
            ("gpt2", key("gpt2.attention.layer_norm_epsilon", float("nan")), "layer_norm_epsilon"),
            ("gpt2", key("gpt2.embedding_length", 0), "embedding_length"),
        ],
        3,
    ),
)
def test_what_is_missing_or_does_not_fit_is_named(
    name: str, change: Change, word: str, tmp_path: Path
) -> None:
    path = write_gguf(name, make_model(name), tmp_path / "model.gguf", change)
    assert word in refusal(path, CorruptModelError)


def test_a_packing_that_cannot_be_read_is_named_before_anything_is_made(tmp_path: Path) -> None:
    def pack(_keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["blk.0.ffn_up.weight"] = np.zeros((128, 32), np.float64)

    path = write_gguf("gpt2", make_model("gpt2"), tmp_path / "model.gguf", pack)
    assert "F64" in refusal(path, UnsupportedModelError)


def test_the_general_file_of_sentencepiece_and_its_keys_load_too(tmp_path: Path) -> None:
    vocabulary = sentencepiece_keys()

    def change(keys: dict[str, Any], _tensors: dict[str, Any]) -> None:
        for name in [name for name in keys if name.startswith("tokenizer.")]:
            del keys[name]
        keys.update(vocabulary)

    size = len(vocabulary["tokenizer.ggml.tokens"])
    for name in ("phi3", "mixtral", "stablelm"):
        source = make_model(name, vocab_size=size)
        path = write_gguf(name, source, tmp_path / f"{name}.gguf", change)
        loaded = load_model(path, dtype="float32")
        tokens = loaded.tokenizer.encode("The capital of France")
        assert loaded.tokenizer.decode(tokens).strip() == "The capital of France"
        assert tokens[0] == 2  # <bos>, as llama.cpp adds where the file does not say otherwise


def test_experts_packed_in_blocks_equal_what_the_gguf_package_unpacks(tmp_path: Path) -> None:
    source, kind = make_model("mixtral"), gguf.GGMLQuantizationType.Q8_0
    unpacked: dict[str, Any] = {}

    def pack(_keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        for part in ("gate", "up"):
            name = f"blk.0.ffn_{part}_exps.weight"
            tensors[name] = unpacked[part] = gguf.dequantize(gguf.quantize(tensors[name], kind), kind)

    plain = converted_gguf(write_gguf("mixtral", source, tmp_path / "plain.gguf", pack), "float32")
    ours = load_file(plain / "model.safetensors")["model.layers.0.mlp.experts.gate_up_proj"]
    assert np.array_equal(ours.numpy(), np.concatenate([unpacked["gate"], unpacked["up"]], axis=1))
