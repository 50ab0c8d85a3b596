"""A converted tokenizer's merges are written in the form that is read fastest, with the same meaning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the extra `llm` is not installed")

from tokenizers import Tokenizer
from tokenizers.models import BPE

from acclimate.llm.gguf.tokenizer import write_merges_as_lines


def saved(tmp_path: Path, merges: list[tuple[str, str]]) -> Path:
    pieces = [piece for merge in merges for piece in (*merge, "".join(merge))]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys([*"abc", *pieces]))}
    file = tmp_path / "tokenizer.json"
    Tokenizer(BPE(vocabulary, merges)).save(str(file))
    return file


def test_a_tokenizer_with_merges_as_lines_is_the_same_tokenizer(tmp_path: Path) -> None:
    file = saved(tmp_path, [("a", "b"), ("ab", "c"), ("▁", "é"), ("#", "x")])
    before = Tokenizer.from_file(str(file)).to_str()
    write_merges_as_lines(file)
    assert json.loads(file.read_bytes())["model"]["merges"][1] == "ab c"
    assert Tokenizer.from_file(str(file)).to_str() == before


@pytest.mark.parametrize("merge", [("a ", "b"), (" ", " "), ("#version", "1")])
def test_merges_that_no_line_can_hold_stay_pairs(merge: tuple[str, str], tmp_path: Path) -> None:
    file = saved(tmp_path, [("a", "b"), merge])
    before = file.read_bytes()
    write_merges_as_lines(file)
    assert file.read_bytes() == before
