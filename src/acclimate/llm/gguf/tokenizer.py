"""Makes the tokenizer of a GGUF file from the vocabulary in its header, with the tokens that llama.cpp gives.

Each key of the file's ``tokenizer.*`` is used, is known to have no effect, or is refused by its name.
"""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

from acclimate.errors import CorruptModelError, UnsupportedModelError
from acclimate.llm.gguf.header import GGUFHeader, is_text
from acclimate.llm.gguf.splits import SPLITS, UNSTATED, Split
from acclimate.llm.gguf.vocabulary import (
    CONTROL,
    TOKEN_KEY,
    TOKEN_NAMES,
    UNKNOWN,
    USER_DEFINED,
    GGUFVocabulary,
    flag,
)
from acclimate.llm.quiet import why_unusable

logger = logging.getLogger("acclimate.llm")

_MODELS = ("gpt2", "llama", "gemma4")
"""Bytes, SentencePiece, and SentencePiece whose merges the file has."""
_GEMMA4_PIECES = r"[^\n]+|\n+"
_READ = frozenset(
    f"tokenizer.{name}"
    for name in (
        "chat_template",
        "ggml.add_bos_token",
        "ggml.add_eos_token",
        "ggml.add_space_prefix",
        "ggml.merges",
        "ggml.model",
        "ggml.pre",
        "ggml.scores",
        "ggml.token_type",
        "ggml.tokens",
    )
)
# llama.cpp reads these for other kinds of vocabularies only, or not at all.
_WITHOUT_EFFECT = frozenset(
    f"tokenizer.{name}"
    for name in (
        "chat_templates",
        "ggml.add_mask_token",
        "ggml.add_padding_token",
        "ggml.add_sep_token",
        "ggml.add_unknown_token",
        "ggml.normalizer.lowercase",
        "ggml.normalizer.strip_accents",
        "ggml.precompiled_charsmap",
        "ggml.remove_extra_whitespaces",
        "ggml.token_type_count",
        "huggingface.json",
        "rwkv.world",
    )
)
# Deriving merges takes time quadratic in a token's length; real tokens have about 100 bytes.
_LONGEST_TOKEN = 1024


def check_vocabulary(header: GGUFHeader) -> None:
    """Checks a vocabulary as far as possible without reading it.

    Raises:
        CorruptModelError: a part of it is missing or contradicts another.
        UnsupportedModelError: it is of a kind that cannot be converted.
    """
    kind = header.value("tokenizer.ggml.model")
    if kind not in _MODELS:
        raise UnsupportedModelError(
            f"{header.path} has a tokenizer of the kind {kind!r}; only these can be converted: "
            f"{', '.join(_MODELS)}"
        )
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    count = tokens.array_length if tokens is not None else None
    if tokens is None or not count or tokens.numbers_start is not None:
        raise CorruptModelError(
            f"{header.path} holds no vocabulary: tokenizer.ggml.tokens is not a list of strings"
        )
    if tokens.longest_string > _LONGEST_TOKEN:
        raise CorruptModelError(
            f"{header.path} is corrupt: a token of its vocabulary has {tokens.longest_string:,} bytes"
        )
    merges = header.metadata.get("tokenizer.ggml.merges")
    if merges is not None and merges.strings_start is None:
        raise CorruptModelError(f"{header.path} is corrupt: tokenizer.ggml.merges is not a list of strings")
    needed = "tokenizer.ggml.scores" if kind == "llama" else "tokenizer.ggml.merges"
    if needed not in header.metadata and merges is None:
        raise CorruptModelError(f"{header.path} lacks the key {needed}, which its tokenizer needs")
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        entry = header.metadata.get(key)
        if entry is not None and (entry.array_length != count or entry.numbers_start is None):
            raise CorruptModelError(f"{header.path} is corrupt: {key} is not a list of {count:,} numbers")
    _split(header)
    _refuse_other_keys(header)


def _refuse_other_keys(header: GGUFHeader) -> None:
    """Raises :class:`UnsupportedModelError` if a key could change the tokens in a way unknown here."""
    for key in header.metadata:
        if not key.startswith("tokenizer.") or key in _READ or key in _WITHOUT_EFFECT:
            continue
        named = TOKEN_KEY.fullmatch(key)
        if (named is None or named[1] not in TOKEN_NAMES) and not key.startswith("tokenizer.chat_template."):
            raise UnsupportedModelError(
                f"{header.path} has the key {key}, whose effect on its tokens is unknown; remove it "
                "(gguf-new-metadata --remove-metadata) if it has none"
            )


def convert_tokenizer(header: GGUFHeader, vocabulary: GGUFVocabulary, target: Path) -> None:
    """Saves the tokenizer of a file whose vocabulary has been checked to the folder ``target``.

    Raises:
        CorruptModelError: the vocabulary contradicts itself.
    """
    from transformers import PreTrainedTokenizerFast

    split = _split(header)
    if split is UNSTATED:
        logger.warning("%s names no pre-tokenizer; llama.cpp's default is used", header.path.name)
    try:
        made = _sentencepiece(header, vocabulary) if split is None else _byte_level(header, vocabulary, split)
        _add_special_tokens(made, header, vocabulary)
    except CorruptModelError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise CorruptModelError(
            f"the tokenizer in {header.path} cannot be converted: {why_unusable(error)}"
        ) from error
    named = {
        "bos_token": vocabulary.start,
        "eos_token": vocabulary.end,
        "unk_token": vocabulary.unknown,
        "pad_token": vocabulary.padding,
    }
    texts = {name: vocabulary.tokens[number] for name, number in named.items() if number is not None}
    template = _chat_template(header)
    # The generic class loads tokenizer.json as it is (1 s). The model's own class gives the same
    # tokens, but rebuilds the tokenizer from its vocabulary at each start (3 s).
    PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **texts).save_pretrained(target)
    # transformers would add the named tokens to those that are found in a text.
    made.save(str(target / "tokenizer.json"))
    write_merges_as_lines(target / "tokenizer.json")


def write_merges_as_lines(file: Path) -> None:
    """Writes a tokenizer's merges as lines "left right", which load in two thirds of the time.

    The merges stay pairs if a line would be parsed differently.
    """
    content = json.loads(file.read_bytes())
    merges = content["model"].get("merges")
    if isinstance(merges, list) and all(_fits_a_line(merge) for merge in merges):
        content["model"]["merges"] = [" ".join(merge) for merge in merges]
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        file.write_text(text, encoding="utf-8")


def _fits_a_line(merge: Any) -> bool:
    # The tokenizers library splits a line at each space, and skips one that begins like a file's first line.
    return isinstance(merge, list) and " " not in "".join(merge) and not merge[0].startswith("#version")


def _chat_template(header: GGUFHeader) -> str | None:
    """Returns the template of a conversation, without which a model still continues texts."""
    entry = header.metadata.get("tokenizer.chat_template")
    if entry is None or not isinstance(entry.value, str):
        return None
    if not is_text(entry.value):
        logger.warning("the chat template of %s is not UTF-8, so it is left out", header.path.name)
        return None
    return entry.value


def _split(header: GGUFHeader) -> Split | None:
    """Returns how a byte-level vocabulary splits text; ``None`` for SentencePiece, which does not.

    Raises:
        UnsupportedModelError: the file names an unknown pre-tokenizer.
    """
    if header.value("tokenizer.ggml.model") != "gpt2":
        return None
    name = header.value("tokenizer.ggml.pre")
    if name in (None, "", "default"):
        return UNSTATED
    found = SPLITS.get(str(name))
    if found is None:
        raise UnsupportedModelError(
            f"{header.path} has a tokenizer with the pre-tokenizer {name!r}, which is unknown here"
        )
    return found


def _byte_level(header: GGUFHeader, vocabulary: GGUFVocabulary, split: Split) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    numbers = {text: number for number, text in enumerate(vocabulary.tokens)}
    made = Tokenizer(models.BPE(numbers, _stored_merges(header), ignore_merges=split.whole_words))
    splits: list[Any] = [
        pre_tokenizers.Split(Regex(expression), "isolated") for expression in split.expressions
    ]
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    return made


def _stored_merges(header: GGUFHeader) -> list[tuple[str, str]]:
    stored = dict.fromkeys(header.strings("tokenizer.ggml.merges") or ())  # of equal merges, the first counts
    cuts = ((merge, merge.find(" ", 1)) for merge in stored)  # the left part may begin with a space
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts]


def _sentencepiece(header: GGUFHeader, vocabulary: GGUFVocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    has_merges = header.value("tokenizer.ggml.model") == "gemma4"
    numbers = {text: number for number, text in enumerate(vocabulary.tokens)}
    scores = None if has_merges else header.numbers("tokenizer.ggml.scores")
    merges = _stored_merges(header) if scores is None else _derived_merges(numbers, scores)
    unknown = None if vocabulary.unknown is None else vocabulary.tokens[vocabulary.unknown]
    made = Tokenizer(models.BPE(numbers, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = not has_merges and flag(header, "tokenizer.ggml.add_space_prefix", True)
    spaces: list[Any] = [normalizers.Prepend("▁")] if prefixed else []
    made.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    if has_merges:
        made.pre_tokenizer = pre_tokenizers.Split(Regex(_GEMMA4_PIECES), "isolated")
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefixed else parts)
    return made


def _derived_merges(numbers: dict[str, int], scores: tuple[int | float | bool, ...]) -> list[tuple[str, str]]:
    """Returns the merges of a vocabulary that has scores only; those of better tokens go first."""
    found: list[tuple[float, int, int, str, str]] = []
    for text, number in numbers.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in numbers and right in numbers:
                found.append((-scores[number], -len(left), -len(right), left, right))
    found.sort(key=lambda merge: merge[:3])
    if any(a[0] == b[0] and a[3] + a[4] != b[3] + b[4] for a, b in pairwise(found)):
        # llama.cpp merges the leftmost of them first, which the tokenizers library cannot.
        logger.warning("several tokens have the same score; where two overlap, llama.cpp may take the other")
    return [(left, right) for *_, left, right in found]


def _add_special_tokens(made: Any, header: GGUFHeader, vocabulary: GGUFVocabulary) -> None:
    """Adds the tokens that are found whole in a text, and those that stand at its start and end."""
    from tokenizers import AddedToken, processors

    # A Phi-3 drops the spaces after most of its special tokens. Only the file's name says that it is one.
    drops_spaces = any(name in str(header.value("general.name")).lower() for name in ("phi-3", "phi3"))
    keeps_spaces = ("<unk>", "<s>", "<|endoftext|>")
    added = [
        AddedToken(
            text,
            special=kind != USER_DEFINED,
            normalized=False,
            rstrip=drops_spaces and text not in keeps_spaces,
        )
        for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in (CONTROL, USER_DEFINED, UNKNOWN)
    ]
    made.add_tokens(added)
    start = vocabulary.start if vocabulary.adds_start else None
    end = vocabulary.end if vocabulary.adds_end else None
    # By names of our own, because a colon in a token's text would be read as part of a template.
    around = {name: number for name, number in (("start", start), ("end", end)) if number is not None}
    if around:
        template = [name for name in ("start", "$A", "end") if name == "$A" or name in around]
        made.post_processor = processors.TemplateProcessing(
            single=template,
            special_tokens=[
                {"id": name, "ids": [number], "tokens": [vocabulary.tokens[number]]}
                for name, number in around.items()
            ],
        )
