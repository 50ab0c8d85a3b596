"""A model whose files change, or whose path names another file, while it is converted or loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tiny_models import write_tiny_gguf

from acclimate.errors import CorruptModelError
from acclimate.llm import load_model
from acclimate.llm.gguf import convert
from acclimate.llm.gguf.convert import BLOCKS, converted_gguf
from acclimate.llm.loading.loaded_model import load_tokenizer

FORMS = ["float32", BLOCKS]
Change = Callable[[Path, Path], None]


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Two GGUF files with other weights, in blocks of other types."""
    paths = tmp_path / "first" / "model.gguf", tmp_path / "second" / "model.gguf"
    for path, kind in zip(paths, ("Q8_0", "F16"), strict=True):
        path.parent.mkdir()
        write_tiny_gguf("gemma3", path, gguf.GGMLQuantizationType[kind])
    return paths


def during(monkeypatch: pytest.MonkeyPatch, step: str, change: Callable[[], None]) -> None:
    """Calls ``change`` just before a step of the conversion, once."""
    original = getattr(convert, step)
    left = [change]

    def changed_first(*args: Any) -> Any:
        if left:
            left.pop()()
        return original(*args)

    monkeypatch.setattr(convert, step, changed_first)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "acclimate.json"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("step", ["read_gguf_header", "_empty_model", "write_vocabulary"])
def test_a_link_that_names_another_file_meanwhile_leaves_nothing_of_the_other_file(
    form: str, step: str, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = models
    expected = contents(converted_gguf(first, form))
    shutil.rmtree(convert.cache_root() / "models")
    link = tmp_path / "model.gguf"
    link.symlink_to(first)

    def retarget(target: Path) -> None:
        link.unlink()
        link.symlink_to(target)

    during(monkeypatch, step, lambda: retarget(second))
    during(monkeypatch, "_write_settings", lambda: retarget(first))
    assert contents(converted_gguf(link, form)) == expected


def put_back(path: Path, other: Path) -> None:
    path.rename(path.with_name("aside"))
    shutil.copy2(other, path)


def overwrite(path: Path, other: Path) -> None:
    status = path.stat()
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", [put_back, overwrite])
@pytest.mark.parametrize("step", ["read_gguf_header", "_empty_model", "_write_settings"])
def test_a_file_that_changes_while_it_is_converted_is_named_and_nothing_is_kept(
    form: str, change: Change, step: str, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = models
    during(monkeypatch, step, lambda: change(first, second))
    with pytest.raises(CorruptModelError, match=r"first/model\.gguf was replaced or changed"):
        converted_gguf(first, form)
    assert not [file for file in (convert.cache_root() / "models").iterdir() if file.name[0] != "."]


def test_blocks_are_read_from_the_file_that_was_converted(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = models
    load_model(first)

    def load(*args: Any) -> Any:
        shutil.copy2(second, first)
        return load_tokenizer(*args)

    monkeypatch.setattr("acclimate.llm.loading.load.load_tokenizer", load)
    with pytest.raises(CorruptModelError, match=r"first/model\.gguf was replaced or changed"):
        load_model(first)
