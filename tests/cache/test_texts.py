"""Texts in the cache: found again as they were saved, or not at all."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from acclimate.cache.texts import TextCache

TEXTS = TextCache("notes", "note.txt", "the note", "it is written anew", logging.getLogger("acclimate"))


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACCLIMATE_CACHE", str(tmp_path))
    return tmp_path


def test_a_text_is_found_under_its_key_alone() -> None:
    TEXTS.save("a", "naïve \ud7ff\n")
    assert TEXTS.load("a", str) == "naïve \ud7ff\n"
    assert TEXTS.load("b", str) is None
    TEXTS.save("a", "another")
    assert TEXTS.load("a", str) == "another"


def test_a_damaged_or_unusable_text_is_not_used(
    private_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    TEXTS.save("a", "12345")
    assert TEXTS.load("a", int) == 12345
    file = private_cache / "notes" / "a" / "note.txt"
    whole = file.read_bytes()
    choice = random.Random(0)
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[choice.randrange(len(damaged))] ^= 1 << choice.randrange(8)
        file.write_bytes(damaged)
        assert TEXTS.load("a", int) in (None, 12345)  # a space of JSON's own may become another one
    for damage in (b"", b"[]", b'{"digest": 1}', whole[: len(whole) // 2]):
        file.write_bytes(damage)
        assert TEXTS.load("a", int) is None
    TEXTS.save("a", "no number")
    assert TEXTS.load("a", int) is None
    assert "it is written anew" in caplog.text


def test_a_text_that_others_can_change_is_not_used(private_cache: Path) -> None:
    TEXTS.save("a", "text")
    (private_cache / "notes" / "a" / "note.txt").chmod(0o666)
    assert TEXTS.load("a", str) is None


def test_a_cache_that_takes_no_files_costs_only_the_text(
    private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (private_cache / "file").touch()
    monkeypatch.setenv("ACCLIMATE_CACHE", str(private_cache / "file"))
    TEXTS.save("a", "text")
    assert TEXTS.load("a", str) is None
