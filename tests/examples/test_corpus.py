"""The text that the example reads, and its order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from example_modules import example_module
from hypothesis import given
from hypothesis import strategies as st

corpus = example_module("corpus")


@given(
    length=st.integers(2, 300), context=st.integers(1, 30), seed=st.integers(0, 9), epochs=st.integers(1, 3)
)
def test_each_window_is_read_once_an_epoch(length: int, context: int, seed: int, epochs: int) -> None:
    windows = corpus.Windows(torch.arange(length), context, seed)
    if len(windows) == 0:
        return
    inputs, targets = windows.batch(0, epochs * len(windows))
    assert inputs.shape == targets.shape == (epochs * len(windows), context)
    assert torch.equal(targets, inputs + 1)  # the token at each place is its number
    for epoch in inputs[:, 0].reshape(epochs, -1).tolist():
        assert sorted(epoch) == [context * place for place in range(len(windows))]


@given(
    first=st.integers(0, 500),
    parts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    seed=st.integers(0, 9),
)
def test_a_batch_is_the_same_however_it_is_dealt_out(first: int, parts: list[int], seed: int) -> None:
    windows = corpus.Windows(torch.arange(200), 7, seed)
    whole, _ = windows.batch(first, sum(parts))
    dealt = [windows.batch(first + sum(parts[:place]), count)[0] for place, count in enumerate(parts)]
    assert torch.equal(torch.cat(dealt), whole)


def test_epochs_and_seeds_differ_in_their_order() -> None:
    windows = corpus.Windows(torch.arange(1000), 7, seed=1)
    first, second = (windows.batch(start, len(windows))[0] for start in (0, len(windows)))
    other = corpus.Windows(torch.arange(1000), 7, seed=2).batch(0, len(windows))[0]
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


@given(text=st.binary(min_size=1, max_size=400), context=st.integers(1, 40))
def test_a_text_is_split_in_two_that_share_nothing_or_is_too_short(text: bytes, context: int) -> None:
    try:
        training, validation = corpus.split(text, context, 0)
    except corpus.TextError:
        assert len(text) < 2 * (context + 1)
        return
    assert bytes(torch.cat([training.tokens, validation.tokens]).tolist()) == text
    assert len(training) >= 1
    assert len(validation) >= 1


def test_the_standard_librarys_source_is_the_default() -> None:
    text = corpus.read_text(None)
    assert len(text) > 5_000_000
    assert b"class HTTPServer(" in text


def test_a_folders_text_files_are_read_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "poems").mkdir()
    (tmp_path / "poems/one.txt").write_text("Shall I compare thee")
    (tmp_path / "notes.md").write_text("to a summer's day?")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/config").write_text("[core]")
    found = corpus.read_text(tmp_path)
    assert sorted(found.split(b"\0")) == [b"Shall I compare thee", b"to a summer's day?"]


def test_a_folder_without_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        corpus.TextError, match=r"holds no text\. Name a text file, or a folder of them: --data"
    ):
        corpus.read_text(tmp_path)
