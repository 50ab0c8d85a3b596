"""Converts the tokenizer of a GGUF file, through transformers, from the vocabulary in the file's header."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from acclimate.errors import CorruptModelError, UnsupportedModelError
from acclimate.inference.gguf.header import GGUFHeader
from acclimate.inference.gguf.keys_only import write_keys_only
from acclimate.inference.quiet import why_unusable

logger = logging.getLogger("acclimate.inference")

_MODELS = ("gpt2", "llama")
# llama.cpp's names of pre-tokenizers that equal one which transformers knows under another name.
_LIKE_GPT2 = frozenset({"gpt-2", "phi-2", "jina-es", "jina-de", "mellum", "modern-bert", "olmo", "mpt"})
_DIGIT_BY_DIGIT = frozenset(
    {"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"}
)
_LIKE_QWEN2 = frozenset({"stablelm2", "hunyuan", "solar-open"})
# The file names no pre-tokenizer; llama.cpp warns and uses a default, too.
_UNSTATED = frozenset({"", "default"})
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
    needed = "tokenizer.ggml.merges" if kind == "gpt2" else "tokenizer.ggml.scores"
    if needed not in header.metadata and "tokenizer.ggml.merges" not in header.metadata:
        raise CorruptModelError(f"{header.path} lacks the key {needed}, which its tokenizer needs")
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        entry = header.metadata.get(key)
        if entry is not None and (entry.array_length != count or entry.numbers_start is None):
            raise CorruptModelError(f"{header.path} is corrupt: {key} is not a list of {count:,} numbers")
    _split(header)


def convert_tokenizer(header: GGUFHeader, target: Path) -> None:
    """Saves the tokenizer of a file whose vocabulary has been checked to the folder ``target``.

    Raises:
        CorruptModelError: the vocabulary contradicts itself.
    """
    from transformers import PreTrainedTokenizerFast

    # In a separate folder, because transformers would also read other files beside it.
    with tempfile.TemporaryDirectory(dir=target, prefix=".vocabulary") as folder:
        write_keys_only(header, Path(folder) / "model.gguf")
        try:
            # The generic class loads tokenizer.json as it is (1 s). The model's own class gives the same
            # tokens, but rebuilds the tokenizer from its vocabulary at each start (3 s).
            tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file="model.gguf")
            split = _split(header)
            if split is not None:
                tokenizer.backend_tokenizer.pre_tokenizer = split
        except Exception as error:  # the tokenizers library raises plain Exception
            raise CorruptModelError(
                f"the tokenizer in {header.path} cannot be converted: {why_unusable(error)}"
            ) from error
    tokenizer.name_or_path = ""  # else the name of the temporary folder
    tokenizer.save_pretrained(target)
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


def _split(header: GGUFHeader) -> Any | None:
    """Returns the pre-tokenizer of a file, or ``None`` if transformers already chooses the right one.

    Raises:
        UnsupportedModelError: the file names an unknown pre-tokenizer.
    """
    from tokenizers import Regex, pre_tokenizers

    name = header.value("tokenizer.ggml.pre") or ""
    if header.value("tokenizer.ggml.model") != "gpt2":  # SentencePiece does not pre-tokenize
        return None
    known = _known_splits()
    if name in _UNSTATED:
        logger.warning("%s names no pre-tokenizer; GPT-2's is used", header.path.name)
        return None
    if name in known or name in _LIKE_GPT2:
        return None
    if name in _DIGIT_BY_DIGIT:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name in _LIKE_QWEN2 and "qwen2" in known:
        by_words = pre_tokenizers.Split(Regex(known["qwen2"]), behavior="isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([by_words, bytes_only])
    raise UnsupportedModelError(
        f"{header.path} has a tokenizer with the pre-tokenizer {name!r}, which transformers does not know"
    )


def _known_splits() -> dict[str, str]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # an older transformers chooses by architecture
        return {"llama-bpe": "", "qwen2": ""}
    splits: dict[str, str] = GGUF_PRE_TOKENIZER_SPLITS
    return splits
