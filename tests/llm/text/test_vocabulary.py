"""A part of a vocabulary gives a text's tokens exactly as the whole tokenizer does."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the extra `llm` is not installed")

from tiny_models import TEXT
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from acclimate.llm.text.tokenizers import ConvertedTokenizer
from acclimate.llm.text.vocabulary import (
    FILE,
    MOST_CHARACTERS,
    UnsuitableError,
    Vocabulary,
    write_vocabulary,
)

PROSE = [Path(__file__).read_text(), *TEXT, "  spaces   in\n\n\nplaces\t\tand naïve café Straße 数学 ½ ﬁ ①"]


def _byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        PROSE, _trainer(600, ["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


def _words_first() -> Tokenizer:
    """As Llama 3's: a word that is a token is not merged."""
    made = _byte_level()
    content = json.loads(made.to_str())
    content["model"]["ignore_merges"] = True
    # A word of the vocabulary that no merges give.
    content["model"]["vocab"]["mathematics"] = len(content["model"]["vocab"])
    return Tokenizer.from_str(json.dumps(content))


def _with_byte_fallback() -> Tokenizer:
    """As Gemma's and Llama 2's: characters, bytes for those that are unknown, spaces as a sign."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.train_from_iterator(
        PROSE, _trainer(700, ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))])
    )
    return made


def _normalized() -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="[UNK]"))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+|\w+|[^\s\w]+"), "isolated")
    made.train_from_iterator(PROSE, _trainer(500, ["[UNK]"]))
    made.add_tokens(
        [AddedToken("Café", normalized=False), AddedToken("<Mask>", lstrip=True, normalized=False)]
    )
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": _byte_level,
    "words first": _words_first,
    "byte fallback": _with_byte_fallback,
    "normalized": _normalized,
}


def _trainer(size: int, special: list[str], **options: Any) -> BpeTrainer:
    return BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False, **options)


def _written(made: Tokenizer, folder: Path) -> Path:
    content = json.loads(made.to_str())
    # Where a special token is also in the vocabulary, as converters write it.
    content["model"]["vocab"] |= {token["content"]: token["id"] for token in content["added_tokens"]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    write_vocabulary(folder)
    return folder


def _texts() -> list[str]:
    choice = random.Random(0)
    prose = "".join(PROSE)
    texts = ["", " ", "\n", "mathematics is", "<s>A CAFÉ café  <Mask>x<unk></s> <0x41>", "🤦🏽 unknown 𓀀 ꧁"]
    for _ in range(120):
        start = choice.randrange(len(prose))
        text = prose[start : start + choice.randrange(80)]
        place = choice.randrange(len(text) + 1)
        texts.append(text[:place] + choice.choice(["", "<s>", " <Mask> ", "Café", "\u0301"]) + text[place:])
    return texts


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_the_vocabulary_gives_the_tokens_and_texts_of_the_whole(kind: str, tmp_path: Path) -> None:
    folder = _written(KINDS[kind](), tmp_path)
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    table = Vocabulary(folder / FILE)
    suitable = 0
    for text in _texts():
        expected = whole.encode(text).ids
        try:
            assert table.encode(text) == expected, text
            suitable += 1
        except UnsuitableError:
            pass
        assert table.decode(expected) == whole.decode(expected, skip_special_tokens=True)
    assert suitable > 60
    choice = random.Random(1)
    for _ in range(100):
        tokens = [choice.randrange(whole.get_vocab_size() + 20) for _ in range(choice.randrange(9))]
        assert table.decode(tokens) == whole.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_tokenizer_gives_the_same_tokens_for_any_text(kind: str, tmp_path: Path) -> None:
    folder = _written(KINDS[kind](), tmp_path)
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made = ConvertedTokenizer(folder)
    for text in [*_texts()[:20], "long " * MOST_CHARACTERS]:  # more texts than are read in parts
        assert made.encode(text) == whole.encode(text).ids


def test_a_tokenizer_of_another_kind_gets_no_table(tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert not (_written(made, tmp_path) / FILE).exists()
    assert ConvertedTokenizer(tmp_path).encode("b") == [1]


def test_a_tokenizer_that_normalizes_added_tokens_gets_no_table(tmp_path: Path) -> None:
    made = _normalized()
    made.add_tokens([AddedToken("Straße", normalized=True)])
    assert not (_written(made, tmp_path) / FILE).exists()


def test_a_damaged_table_is_an_error_wherever_the_damage_is(tmp_path: Path) -> None:
    file = _written(_byte_level(), tmp_path) / FILE
    whole = file.read_bytes()
    choice = random.Random(0)
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[choice.randrange(whole.index(b"\n") + 1, len(whole))] ^= 1 << choice.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="digest"):
            Vocabulary(file)
    for damage in (b"", whole[:100], whole[:-1]):
        file.write_bytes(damage)
        with pytest.raises((ValueError, KeyError)):
            Vocabulary(file)
