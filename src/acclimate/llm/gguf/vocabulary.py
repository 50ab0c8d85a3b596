"""Reads a GGUF file's vocabulary: its tokens, their types, and those with a meaning, as llama.cpp does.

A file names few of its special tokens, and some files name them wrongly. llama.cpp recognises others by
their text, so that a chat model stops where its turn ends.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from acclimate.errors import CorruptModelError
from acclimate.llm.gguf.header import GGUFHeader, Scalar
from acclimate.llm.gguf.splits import SPLITS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of tokens, as in the key ``tokenizer.ggml.token_type``."""

# Tokens that end a text wherever a vocabulary has them.
_END_TEXTS = frozenset(
    {
        *("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<\uff5cend▁of▁sentence\uff5c>"),
        *(
            "<|im_end|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|end|>",
            "<end_of_turn>",
            "<turn|>",
            "<end_of_utterance>",
        ),
        *("<EOT>", "_<EOT>", "[EOT]", "[e~[", "<|tool_response>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
    }
)
# Tokens for filling in code, which are special by their text if the file names none by its key.
_FILL_IN = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim▁begin\uff5c>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim▁hole\uff5c>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim▁end\uff5c>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
}
_OLD_NAMES = {"prefix": "fim_pre", "suffix": "fim_suf", "middle": "fim_mid"}
# The meanings that end a text. After the last three, a model goes on with something that was not asked for.
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
TOKEN_KEY = re.compile(r"tokenizer\.ggml\.(\w+)_token_ids?")
"""The keys that name a token, or a list of tokens, with a meaning."""
TOKEN_NAMES = frozenset(
    {*_FILL_IN, *_OLD_NAMES, *_ENDS, "bos", "cls", "mask", "padding", "seperator", "unknown"}
)
"""The meanings with an effect, or known to have none."""
# gpt-oss puts these between the parts of an answer, which a reader needs to see.
_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


# llama.cpp's numbers of special tokens that a file does not name.
_USUAL = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "gemma4": {},
}
_NO_USUAL_START = frozenset({"chatglm-bpe", "glm4", "glm5"})


@dataclass(frozen=True)
class GGUFVocabulary:
    """A vocabulary and the meaning of its tokens."""

    tokens: list[str]
    types: list[int]
    """A type for each token."""
    start: int | None
    end: int | None
    unknown: int | None
    padding: int | None
    ends: tuple[int, ...]
    """All tokens that end a text; the first is :attr:`end`, if there is one."""
    adds_start: bool
    """Whether the tokens of a text begin with the start token."""
    adds_end: bool


def read_vocabulary(header: GGUFHeader) -> GGUFVocabulary:
    """Reads the vocabulary of a file.

    Raises:
        CorruptModelError: a token occurs twice, or a key has a value of a wrong type.
    """
    stored = header.strings("tokenizer.ggml.tokens") or ()
    tokens = [text or f"[EMPTY_{number}]" for number, text in enumerate(stored)]
    numbers = {text: number for number, text in enumerate(tokens)}
    if len(numbers) < len(tokens):
        (repeated, count), *_ = Counter(tokens).most_common(1)
        raise CorruptModelError(
            f"{header.path} is corrupt: its vocabulary has the token {repeated!r} {count:,} times"
        )
    stated = header.numbers("tokenizer.ggml.token_type")
    types = [NORMAL] * len(tokens) if stated is None else [int(number) for number in stated]
    named = _named_tokens(header, len(tokens))
    usual = _usual_tokens(header, types)

    def token(name: str) -> int | None:
        return named.get(name, [usual.get(name)])[0]

    ends = {numbers[text] for text in _END_TEXTS if text in numbers}
    special = set(ends)
    for name, texts in _FILL_IN.items():
        if name not in named:
            found = [numbers[text] for text in texts if text in numbers]
            named[name] = [min(found)] if found else []
            special.update(named[name])
    for number in special:
        types[number] = CONTROL
    for text in _SHOWN:
        if text in numbers:
            types[numbers[text]] = USER_DEFINED
    ends.update(number for name in _ENDS for number in named.get(name, ()))
    ends.update(number for number in (token("eos"),) if number is not None)
    for text, kind in _not_ends({tokens[number] for number in ends}).items():
        ends.remove(numbers[text])
        types[numbers[text]] = kind
    pre = SPLITS.get(str(header.value("tokenizer.ggml.pre")))
    form = header.value("tokenizer.ggml.model")
    adds_start = form == "llama" or (pre is not None and pre.adds_start)
    first = token("eos")
    return GGUFVocabulary(
        tokens,
        types,
        token("bos"),
        first,
        token("unknown"),
        token("padding"),
        tuple(sorted(ends, key=lambda number: (number != first, number))),
        flag(header, "tokenizer.ggml.add_bos_token", adds_start) or form == "gemma4",  # some files are wrong
        flag(header, "tokenizer.ggml.add_eos_token", False),
    )


def flag(header: GGUFHeader, key: str, default: bool) -> bool:
    """Returns the value of a key that must be true or false.

    Raises:
        CorruptModelError: it is something else.
    """
    entry = header.metadata.get(key)
    if entry is None:
        return default
    if not isinstance(entry.value, bool):
        shown = "a list" if entry.array_length is not None else repr(entry.value)
        raise CorruptModelError(f"{header.path} is corrupt: {key} must be true or false; it is {shown}")
    return entry.value


def _named_tokens(header: GGUFHeader, count: int) -> dict[str, list[int]]:
    """Returns the tokens that the file names; numbers beyond the vocabulary count as missing."""
    named: dict[str, list[int]] = {}
    for key, entry in header.metadata.items():
        match = TOKEN_KEY.fullmatch(key)
        if match is None:
            continue
        numbers = header.numbers(key)
        listed: Sequence[Scalar | None] = (entry.value,) if numbers is None else numbers
        if not all(isinstance(identifier, int) and not isinstance(identifier, bool) for identifier in listed):
            raise CorruptModelError(f"{header.path} is corrupt: {key} must be the number of a token")
        known = [
            identifier for identifier in listed if isinstance(identifier, int) and 0 <= identifier < count
        ]
        if known:
            named.setdefault(_OLD_NAMES.get(match[1], match[1]), []).extend(known)
    return named


def _usual_tokens(header: GGUFHeader, types: list[int]) -> dict[str, int]:
    """Returns llama.cpp's numbers of the tokens that a file need not name.

    A number is left out if its token is part of ordinary texts: in GPT-2's own vocabulary, the usual end
    token is the comma.
    """
    found = dict(_USUAL[str(header.value("tokenizer.ggml.model"))])
    if header.value("tokenizer.ggml.pre") in _NO_USUAL_START:
        found.pop("bos", None)
    return {
        name: number
        for name, number in found.items()
        if number < len(types) and types[number] in (CONTROL, UNKNOWN)
    }


def _not_ends(ends: set[str]) -> dict[str, int]:
    """Returns those of the tokens that end no text in this vocabulary, with their types."""
    not_ends = {}
    # gpt-oss and Solar end each part of an answer with <|end|>.
    calls = not ends.isdisjoint({"<|call|>", "<|calls|>"})
    if "<|end|>" in ends and calls and not ends.isdisjoint({"<|return|>", "<|flush|>"}):
        not_ends["<|end|>"] = USER_DEFINED
    # Gemma 4 and PLaMo strike text through with <s> and </s>.
    if "</s>" in ends and not ends.isdisjoint({"<|tool_response>", "<|plamo:eos|>"}):
        not_ends["</s>"] = NORMAL
    return not_ends
