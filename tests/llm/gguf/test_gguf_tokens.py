"""A GGUF file gives llama.cpp's tokens and end tokens, or its tokenizer is refused by name.

What llama.cpp gave is recorded in llama_cpp_tokens.json, by record_llama_cpp.py.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf_files import make_model, write_gguf
from vocabulary_files import TEXTS, byte_level_keys, cases, sentencepiece_keys, write_vocabulary_file

from acclimate.errors import AcclimateError, CorruptModelError, UnsupportedModelError
from acclimate.llm.gguf.convert import converted_gguf
from acclimate.llm.gguf.header import read_gguf_header
from acclimate.llm.gguf.splits import SPLITS
from acclimate.llm.gguf.tokenizer import check_vocabulary, convert_tokenizer
from acclimate.llm.gguf.vocabulary import GGUFVocabulary, read_vocabulary
from acclimate.llm.text.tokenizers import ConvertedTokenizer
from acclimate.llm.text.vocabulary import FILE, write_vocabulary
from quick_parameters import few_of

RECORD = json.loads(Path(__file__).with_name("llama_cpp_tokens.json").read_text())


@cache
def keys_of_all_cases() -> dict[str, dict[str, Any]]:
    return cases(RECORD["pre_tokenizers"])


def convert(keys: dict[str, Any], folder: Path) -> tuple[GGUFVocabulary, ConvertedTokenizer]:
    header = read_gguf_header(write_vocabulary_file(folder / "vocabulary.gguf", keys))
    check_vocabulary(header)
    vocabulary = read_vocabulary(header)
    convert_tokenizer(header, vocabulary, folder)
    return vocabulary, ConvertedTokenizer(folder)


# Of the pre-tokenizers that split text in the same way, one is enough.
SAME = {name: next(other for other in SPLITS if SPLITS[other] == split) for name, split in SPLITS.items()}


@pytest.mark.parametrize(
    "name", few_of([name for name in RECORD["cases"] if SAME.get(name, name) == name], 5)
)
def test_tokens_and_ends_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    result, ends = RECORD["cases"][name]
    vocabulary, whole = convert(keys_of_all_cases()[name], tmp_path)
    assert sorted(vocabulary.ends) == ends
    write_vocabulary(tmp_path)
    assert (tmp_path / FILE).is_file()
    in_parts = ConvertedTokenizer(tmp_path)
    for text, expected in zip(TEXTS, RECORD["tokens"][result], strict=True):
        assert whole.encode(text) == expected, text
        assert in_parts.encode(text) == expected, text


def test_each_pre_tokenizer_that_is_known_here_was_compared() -> None:
    assert set(RECORD["pre_tokenizers"]) == set(SPLITS)
    assert set(RECORD["cases"]) == set(keys_of_all_cases())
    for name, same in SAME.items():
        assert RECORD["cases"][name] == RECORD["cases"][same], name


def test_words_and_their_spaces_come_back_from_the_tokens(tmp_path: Path) -> None:
    for keys in (byte_level_keys("llama-bpe", ["<s>", "</s>"]), sentencepiece_keys(["<s>", "</s>"])):
        _, tokenizer = convert(keys, tmp_path)
        for text in TEXTS:
            if "<" not in text:
                assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_empty_list_of_ends_is_no_end(tmp_path: Path) -> None:
    keys = byte_level_keys("qwen2", ["<s>", "<e>"], 20) | {"tokenizer.ggml.eos_token_ids": []}
    assert convert(keys, tmp_path)[0].ends == (1,)


@pytest.mark.parametrize("key", ["eos_token_ids", "eot_token_ids", "eos_token_id"])
def test_each_token_of_a_list_of_ends_ends_a_text(key: str, tmp_path: Path) -> None:
    keys = byte_level_keys("qwen2", ["<s>", "<e>", "<f>", "<g>"], 20)
    vocabulary, _ = convert(keys | {f"tokenizer.ggml.{key}": [1, 3]}, tmp_path)
    assert vocabulary.ends == (1, 3)


def test_the_end_of_a_turn_also_ends_a_text(tmp_path: Path) -> None:
    def rename(keys: dict[str, Any], _tensors: dict[str, Any]) -> None:
        keys["tokenizer.ggml.tokens"][7] = "<|im_end|>"

    path = write_gguf("llama", make_model("llama"), tmp_path / "model.gguf", rename)
    folder = converted_gguf(path, "float32")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1, 7]


def test_a_usual_end_token_that_is_part_of_texts_ends_none(tmp_path: Path) -> None:
    keys = byte_level_keys("gpt-2", ["<s>"], 20)
    del keys["tokenizer.ggml.eos_token_id"]  # llama.cpp ends at number 11, which is a comma in GPT-2
    assert convert(keys, tmp_path)[0].ends == ()


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("tokenizer.ggml.suppress_tokens", [3], UnsupportedModelError),
        ("tokenizer.ggml.made_up", True, UnsupportedModelError),
        ("tokenizer.ggml.made_up_token_id", 3, UnsupportedModelError),
        ("tokenizer.ggml.pre", "made-up", UnsupportedModelError),
        ("tokenizer.ggml.pre", "gemma4", UnsupportedModelError),
        ("tokenizer.ggml.model", "rwkv", UnsupportedModelError),
        ("tokenizer.ggml.eos_token_id", "last", CorruptModelError),
        ("tokenizer.ggml.add_bos_token", 1, CorruptModelError),
        ("tokenizer.ggml.add_bos_token", [True], CorruptModelError),
        ("tokenizer.ggml.merges", [1, 2], CorruptModelError),
    ],
)
def test_a_key_of_the_tokenizer_that_cannot_be_followed_is_refused_by_name(
    key: str, value: Any, error: type[AcclimateError], tmp_path: Path
) -> None:
    keys = byte_level_keys("qwen2", ["<s>", "</s>"], 20) | {key: value}
    with pytest.raises(error) as caught:
        convert(keys, tmp_path)
    assert key in str(caught.value) or repr(value) in str(caught.value)


def test_keys_without_an_effect_are_accepted(tmp_path: Path) -> None:
    keys = byte_level_keys("qwen2", ["<s>", "</s>"], 20)
    more = {
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_template.tools": "{{ tools }}",
        "tokenizer.chat_templates": ["tools"],
        "tokenizer.ggml.mask_token_id": 3,
        "tokenizer.ggml.precompiled_charsmap": [1, 2, 3],
        "tokenizer.huggingface.json": "{}",
    }
    _, plain = convert(keys, tmp_path)
    _, other = convert(keys | more, tmp_path)
    assert [other.encode(text) for text in TEXTS] == [plain.encode(text) for text in TEXTS]


def test_equal_scores_are_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = sentencepiece_keys(["<s>", "</s>"])
    convert(keys, tmp_path)
    assert "same score" not in caplog.text
    convert(keys | {"tokenizer.ggml.scores": [0.0] * len(keys["tokenizer.ggml.scores"])}, tmp_path)
    assert "same score" in caplog.text


def test_a_token_that_occurs_twice_is_named(tmp_path: Path) -> None:
    keys = byte_level_keys("qwen2", ["<s>", "</s>"], 20)
    keys["tokenizer.ggml.tokens"][9] = "<s>"
    with pytest.raises(CorruptModelError, match="'<s>' 2 times"):
        convert(keys, tmp_path)
