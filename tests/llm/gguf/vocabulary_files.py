"""GGUF files that hold a tiny vocabulary only, to compare their tokens with llama.cpp's."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf

TEXTS = [
    "",
    "Hello world, it's we'LL they'Re I'M he'd don'T",
    "IT'S 'tis x'sy ''ll",
    "1 12 123 1234 12345 1234567 3.14 1,000,000 ½ ²³ ٣٤٥",
    "  two  spaces   three    four and one \n",
    " \t\ttabs\r\n\r\nlines\n\n\n  x\n \n",
    "日本語のテキスト。漢字とカタカナ、한국어 中文12个 ไทย",
    "👩‍👩‍👧 emoji🤦🏽!? (…) 。\uff01",
    "naïve café Straße Ünïcödé Ελλάδα Привет",
    "snake_case camelCase HTTPServer x=a+b; // ok?!\n\t}\n",
    "a\x00b \x01",
    "<s>text</s> and <tool> x  <|end|>\n y <|im_end|>",
    "#$%&*+<=>^`|~ a-b 'quoted' \"x\" @me /path/to",
]


def byte_letters() -> list[str]:
    """The letter of each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def byte_level_keys(pre: str | None, controls: list[str], merges: int = 700) -> dict[str, Any]:
    """A vocabulary whose merges cross the borders of words, so that a wrong split shows."""
    letters = byte_letters()
    words = [[letters[byte] for byte in text.encode()] for text in TEXTS]
    found: list[tuple[str, str]] = []
    tokens, known = [*letters], set(letters)
    while len(found) < merges:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        usable = [(-count, pair) for pair, count in pairs.items() if "".join(pair) not in known]
        if not usable:
            break
        pair = min(usable)[1]
        found.append(pair)
        tokens.append("".join(pair))
        known.add(tokens[-1])
        words = [_merged(word, pair) for word in words]
    # Words that no merges lead to.
    names = [*controls, "<tool>", *tokens, "Ġworld", "Hello", "日本èªŀ", "123"]
    names = list(dict.fromkeys(names))
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [3] * len(controls) + [4] + [1] * (len(names) - len(controls) - 1),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in found],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return keys if pre is None else keys | {"tokenizer.ggml.pre": pre}


def _merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    made: list[str] = []
    for letter in word:
        if made and (made[-1], letter) == pair:
            made[-1] += letter
        else:
            made.append(letter)
    return made


def sentencepiece_keys(controls: list[str], *, has_merges: bool = False) -> dict[str, Any]:
    """A vocabulary with scores, or with merges as Gemma 4's; characters that it lacks become bytes."""
    text = "".join(TEXTS[:7]).replace(" ", "▁")
    letters = sorted({letter for letter in text if letter.isalpha() or letter in "▁.,'1234"})
    tokens, words = list(letters), [list(text.replace(" ", "▁")) for text in TEXTS]
    known = set(letters)
    merges: list[tuple[str, str]] = []
    while True:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        usable = [(-count, pair) for pair, count in pairs.items() if known.issuperset("".join(pair))]
        if len(tokens) >= 400 or not usable:
            break
        pair = min(usable)[1]
        merges.append(pair)
        tokens.append("".join(pair))
        words = [_merged(word, pair) for word in words]
    tokens = list(dict.fromkeys(tokens))
    if has_merges:  # of Gemma 4, whose newlines are tokens
        tokens += ["\n", "\n\n", "\n\n\n"]
        merges += [("\n", "\n"), ("\n\n", "\n")]
    names = ["<unk>", *controls, "<tool>", *(f"<0x{byte:02X}>" for byte in range(256)), *tokens]
    kind = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
    if has_merges:
        kind = {
            "tokenizer.ggml.model": "gemma4",
            "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        }
    return kind | {
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.scores": [0.0] * (len(names) - len(tokens))
        + [-float(at) for at in range(len(tokens))],
        "tokenizer.ggml.token_type": [2] + [3] * len(controls) + [4] + [6] * 256 + [1] * len(tokens),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def write_vocabulary_file(path: Path, keys: dict[str, Any]) -> Path:
    """A GGUF file with these keys and no tensors; a value of ``None`` leaves the key out."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


_GEMMA4 = ["<bos>", "<eos>", "<turn|>", "<|tool_response>", "</s>"]
_CHAT = ["<s>", "</s>", "<|im_end|>", "<|end|>"]


def cases(pre_tokenizers: list[str]) -> dict[str, dict[str, Any]]:
    """The keys of each file to compare, by the file's name."""
    byte_level = byte_level_keys(None, _CHAT)
    pieces = sentencepiece_keys(_CHAT)
    made = {pre: byte_level | {"tokenizer.ggml.pre": pre} for pre in pre_tokenizers}
    made |= {
        "no pre-tokenizer": byte_level,
        "the default pre-tokenizer": byte_level | {"tokenizer.ggml.pre": "default"},
        "SentencePiece": pieces,
        "Gemma 4": sentencepiece_keys(_GEMMA4, has_merges=True),
        "a Phi-3 drops spaces": sentencepiece_keys(["<s>", "</s>", "<|endoftext|>", "<|end|>"])
        | {"general.name": "Phi-3 mini"},
    }
    flags = {
        "add_bos_token": (False, True),
        "add_eos_token": (True,),
        "add_sep_token": (True,),
        "add_space_prefix": (False, True),
        "remove_extra_whitespaces": (True,),
    }
    for key, values in flags.items():
        for value in values:
            made[f"SentencePiece, {key} {value}"] = pieces | {f"tokenizer.ggml.{key}": value}
            made[f"Gemma 4, {key} {value}"] = made["Gemma 4"] | {f"tokenizer.ggml.{key}": value}
            made[f"llama-bpe, {key} {value}"] = made["llama-bpe"] | {f"tokenizer.ggml.{key}": value}
            made[f"qwen2, {key} {value}"] = made["qwen2"] | {f"tokenizer.ggml.{key}": value}
    for name, (controls, changes) in _ENDINGS.items():
        keys = byte_level_keys("qwen2", controls, 20) | {
            f"tokenizer.ggml.{key}": at for key, at in changes.items()
        }
        made[f"ends: {name}"] = {key: value for key, value in keys.items() if value is not None}
    normal = byte_level_keys("qwen2", _CHAT, 20)
    normal["tokenizer.ggml.token_type"] = [1] * len(normal["tokenizer.ggml.tokens"])
    made["ends: all tokens are of the normal type"] = normal
    return made


_GPT_OSS = [
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|call|>",
    "<|end|>",
    "<|channel|>",
    "<|message|>",
]
# The control tokens of each vocabulary, and its keys.
_ENDINGS: dict[str, tuple[list[str], dict[str, int | None]]] = {
    "ChatML": (["<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"], {}),
    "Llama 3": (
        ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>"],
        {},
    ),
    "Gemma": (["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], {}),
    "Gemma 4": (_GEMMA4, {}),
    "Phi 3": (["<s>", "<|endoftext|>", "<|end|>", "<|user|>"], {}),
    "DeepSeek": (
        ["<s>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|EOT|>", "<\uff5cfim\u2581hole\uff5c>"],
        {},
    ),
    "gpt-oss": (_GPT_OSS, {}),
    "gpt-oss, the end of a part is named": (_GPT_OSS, {"eot_token_id": 4, "eos_token_id": 2}),
    "gpt-oss without calls": ([token for token in _GPT_OSS if token != "<|call|>"], {}),
    "Solar": (["<s>", "<|endoftext|>", "<|flush|>", "<|calls|>", "<|end|>"], {}),
    "Kimi": (["[BOS]", "[EOS]", "[EOT]", "[PAD]", "[UNK]"], {}),
    "code": (
        [
            "<s>",
            "<|endoftext|>",
            "<|fim_prefix|>",
            "<|fim_middle|>",
            "<|fim_pad|>",
            "<|repo_name|>",
            "<|file_sep|>",
        ],
        {},
    ),
    "code by keys": (
        ["<s>", "<|endoftext|>", "<a>", "<b>", "<c>", "<d>"],
        {"fim_pad_token_id": 2, "fim_rep_token_id": 3, "fim_sep_token_id": 4, "fim_pre_token_id": 5},
    ),
    "a key beside the text": (["<s>", "</s>", "<|fim_pad|>", "<c>"], {"fim_pad_token_id": 3}),
    "turn and message by keys": (["<s>", "<e>", "<t>", "<m>", "<x>"], {"eot_token_id": 2, "eom_token_id": 3}),
    "old keys": (["<s>", "</s>", "<p>", "<q>"], {"prefix_token_id": 2, "suffix_token_id": 3}),
    "no end token": (["<s>", "</s>", "<|im_end|>", *(f"<{at}>" for at in range(12))], {"eos_token_id": None}),
    "no start token": (["<s>", "</s>", *(f"<{at}>" for at in range(12))], {"bos_token_id": None}),
    "an end token beyond the vocabulary": (
        ["<s>", "</s>", *(f"<{at}>" for at in range(12))],
        {"eos_token_id": 9999},
    ),
    "smol": (["<s>", "</s>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[e~["], {}),
}
