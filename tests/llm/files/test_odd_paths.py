"""A model's files are judged by what they are: never by a resolved name, and never by waiting for a pipe."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from generate_command import PROMPT, Run, assert_one_line_error

from acclimate.cli import main
from acclimate.errors import ModelNotFoundError
from acclimate.llm import generate
from acclimate.llm.files.folder import check_model_folder
from acclimate.llm.loading.deferred_model import empty_model
from acclimate.llm.loading.locate import local_model
from quick_parameters import quick


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def dangling(path: Path) -> None:
    path.symlink_to("nothing")


def folder(path: Path) -> None:
    path.mkdir()


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


ODD = {
    pipe: "is a named pipe, not a file",
    device: "is a device, not a file",
    loop: "is a loop of links",
    dangling: "is a link to nothing",
    folder: "is a folder, not a file",
    a_socket: "is a socket, not a file",
}
MAKERS = pytest.mark.parametrize("make", ODD, ids=lambda make: str(make.__name__))
Make = Callable[[Path], None]


@MAKERS
def test_a_folder_whose_only_gguf_file_is_no_file_says_what_it_is(
    make: Make, acclimate: Run, tmp_path: Path
) -> None:
    make(tmp_path / "model.gguf")
    assert_one_line_error(acclimate(PROMPT, "--model", str(tmp_path)), f"model.gguf {ODD[make]}")
    assert main(["plan", str(tmp_path)]) == 2


@pytest.mark.parametrize("make", [name for name in ODD if name is not folder])
def test_a_path_that_names_no_file_says_what_it_names(make: Make, acclimate: Run, tmp_path: Path) -> None:
    make(tmp_path / "model")
    assert_one_line_error(acclimate(PROMPT, "--model", str(tmp_path / "model")), f"model {ODD[make]}")


@pytest.mark.parametrize(
    "make", quick({str(make.__name__): make for make in ODD}, "pipe", "folder", "dangling")
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_a_file_of_a_folder_that_is_no_file_says_what_it_is(
    name: str, make: Make, tiny_folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    (copy / name).unlink()
    make(copy / name)
    if name == "generation_config.json":  # which a model need not have
        assert generate(PROMPT, model=copy, max_new_tokens=1).generated_tokens == 1
        return
    with pytest.raises(ModelNotFoundError, match=f"{name} {ODD[make]}"):
        check_model_folder(copy)
    with pytest.raises(ModelNotFoundError, match=f"{name} {ODD[make]}"):
        generate(PROMPT, model=copy, max_new_tokens=1)


def test_an_odd_file_beside_the_only_usable_gguf_file_is_left_alone(tiny_gguf: Path, tmp_path: Path) -> None:
    pipe(tmp_path / "a.gguf")
    shutil.copy(tiny_gguf, tmp_path / "b.gguf")
    assert local_model(str(tmp_path)) == (tmp_path, tmp_path / "b.gguf")


def test_a_gguf_file_of_any_name_is_loaded_and_keeps_the_name_that_the_user_gave(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    blob = tmp_path / "blobs" / "0c4f7e"
    link = tmp_path / "snapshots" / "model.gguf"
    blob.parent.mkdir()
    link.parent.mkdir()
    shutil.copy(tiny_gguf, blob)
    link.symlink_to(Path("..") / "blobs" / blob.name)
    texts = [generate(PROMPT, model=path, max_new_tokens=4) for path in (link.parent, blob)]
    assert len({text.tokens for text in texts}) == 1
    assert [text.model for text in texts] == ["model", "0c4f7e"]
    assert empty_model(link)[1] == "model.gguf"


def test_a_file_that_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"GGML")
    with pytest.raises(ModelNotFoundError, match="neither a model folder nor a GGUF file"):
        local_model(str(tmp_path / "weights"))


@pytest.mark.parametrize("with_config", [False, True])
def test_an_adapter_names_its_base_model(
    with_config: bool, tiny_folder: Path, acclimate: Run, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    (tmp_path / "adapter_model.safetensors").touch()
    if with_config:
        for name in ("config.json", "tokenizer.json"):
            shutil.copy(tiny_folder / name, tmp_path)
    done = acclimate(PROMPT, "--model", str(tmp_path))
    words = ("adapter_config.json", "merge") if with_config else ()
    assert_one_line_error(done, "org/base", *words)
