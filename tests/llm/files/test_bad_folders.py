"""A folder that is damaged, or lacks what its files claim, soon gives an error of one line."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_command import PROMPT, Run, assert_one_line_error
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model
from warm_processes import WarmProcesses

import acclimate
from acclimate.errors import AcclimateError, CorruptModelError, GenerationOptionError, ModelNotFoundError
from acclimate.llm import load_model
from acclimate.llm.files.folder import check_model_folder
from quick_parameters import few_of

Damage = Callable[[Path], None]


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(tiny_folder, copy)
    return copy


def fields(name: str, **values: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | values))

    return damage


def config(**values: Any) -> Damage:
    return fields("config.json", **values)


def file(name: str, content: bytes, *without: str) -> Damage:
    def damage(folder: Path) -> None:
        for other in without:
            (folder / other).unlink()
        (folder / name).write_bytes(content)

    return damage


def weights_as_pickle(change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "pytorch_model.bin"
        torch.save(load_file(folder / "model.safetensors"), path)
        (folder / "model.safetensors").unlink()
        path.write_bytes(change(path.read_bytes()))

    return damage


def index(weight_map: Any) -> Damage:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


def bomb(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (8 << 20))


def other_layers(folder: Path) -> None:
    config(num_hidden_layers=1)(folder)


HTML = b"<!DOCTYPE html><html><body>404</body></html>"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1000\n"

DAMAGES: dict[str, tuple[Damage, str]] = {
    # weights and config of different shapes
    "hidden_size": (config(hidden_size=48), "shape"),
    "vocab_size": (config(vocab_size=100), "shape"),
    "more layers": (config(num_hidden_layers=3), "lacks"),
    "fewer layers": (other_layers, "model.layers.1"),
    "another kind": (config(model_type="gpt2"), "model"),
    # fields of the wrong type
    "a text for a size": (config(hidden_size="wide"), "hidden_size"),
    "a list for a size": (config(num_attention_heads=[4]), "num_attention_heads"),
    "null for a size": (config(num_hidden_layers=None), "num_hidden_layers"),
    "a number for an activation": (config(hidden_act=5), "hidden_act"),
    "an unknown activation": (config(hidden_act="made-up"), "made-up"),
    "a negative size": (config(intermediate_size=-1), "model"),
    "no number": (config(rms_norm_eps=float("nan")), "config.json"),
    "no heads": (config(num_attention_heads=0), "model"),
    "a number for rope": (config(rope_parameters=7), "model"),
    "an unknown rope": (config(rope_parameters={"rope_type": "made-up"}), "model"),
    "a list for a kind": (config(model_type=["llama"]), "model_type"),
    "a number for quantization": (config(quantization_config=3), "model"),
    "a list as config": (file("config.json", b"[]"), "config.json"),
    "deep config": (file("config.json", b"[" * 200_000), "config.json"),
    "a list as generation_config": (file("generation_config.json", b"[1]"), "generation_config.json"),
    "a word as eos": (fields("generation_config.json", eos_token_id="x"), "eos_token_id"),
    "a text as tokenizer_config": (file("tokenizer_config.json", b'"x"'), "tokenizer_config.json"),
    # absurd sizes
    "10^5 layers": (config(num_hidden_layers=100_000), "larger than"),
    "10^6 layers": (config(num_hidden_layers=10**6), "num_hidden_layers"),
    "10^18 layers": (config(num_hidden_layers=10**18), "num_hidden_layers"),
    "10^9 labels": (config(num_labels=10**9), "num_labels"),
    "10^12 words": (config(vocab_size=10**12), "larger than"),
    "10^9 wide": (config(hidden_size=10**9), "model"),
    "10^12 in between": (config(intermediate_size=10**12), "larger than"),
    # weights
    "web page as weights": (file("model.safetensors", HTML), "web page"),
    "LFS pointer as weights": (file("model.safetensors", LFS), "Git LFS"),
    "web page as .bin": (file("pytorch_model.bin", HTML, "model.safetensors"), "web page"),
    "empty .bin": (file("pytorch_model.bin", b"", "model.safetensors"), "empty"),
    "noise as .bin": (file("pytorch_model.bin", b"\x80\2noise", "model.safetensors"), ".bin"),
    "cut .bin": (weights_as_pickle(lambda content: content[:-500]), "truncated"),
    "compressed .bin": (bomb, "unpacks"),
    "long header": (file("model.safetensors", (10**15).to_bytes(8, "little") + b"{}"), "header"),
    "weight_map of lists": (index({"a": ["model-1.safetensors"]}), "weight_map"),
    "weight_map of numbers": (index({"a": 5}), "weight_map"),
    "weight_map as list": (index(["model-1.safetensors"]), "weight_map"),
    "weight_map elsewhere": (index({"a": "../other/model.safetensors"}), "weight_map"),
    "weight_map with a long name": (index({"a": "a" * 300 + ".safetensors"}), "incomplete"),
    "weight_map with another tensor": (index({"a": "model-1.safetensors"}), "lacks the tensor a"),
    # tokenizers
    "empty tokenizer": (file("tokenizer.json", b""), "tokenizer"),
    "tokenizer without a model": (file("tokenizer.json", b"{}"), "tokenizer"),
    "web page as tokenizer": (file("tokenizer.json", HTML), "tokenizer"),
    "a list as tokenizer": (file("tokenizer.json", b"[]"), "tokenizer"),
    "a number as tokenizer class": (fields("tokenizer_config.json", tokenizer_class=5), "tokenizer"),
}


def assert_one_plain_line(error: AcclimateError, word: str) -> None:
    message = str(error)
    assert "\n" not in message
    assert len(message) < 800
    assert word in message


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_one_line_that_says_what_is_wrong(name: str, folder: Path) -> None:
    damage, word = DAMAGES[name]
    damage(folder)
    with pytest.raises(AcclimateError) as caught:
        acclimate.generate(PROMPT, model=folder, max_new_tokens=2)
    assert_one_plain_line(caught.value, word)
    assert str(folder) in str(caught.value)


def test_an_absurd_claim_costs_neither_time_nor_memory(warm: WarmProcesses, folder: Path) -> None:
    for damage in (
        config(num_hidden_layers=90_000),
        config(num_hidden_layers=10**7),
        config(vocab_size=10**13),
    ):
        shutil.copy(folder / "config.json", folder / "kept")
        damage(folder)
        done = warm.run(PROMPT, "--model", str(folder), cpu_seconds=20, memory_bytes=1 << 30)
        assert_one_line_error(done, "config")
        shutil.move(folder / "kept", folder / "config.json")


@pytest.mark.parametrize(
    "model", ["a" * 300, "/" + "b/" * 3000, "~nosuchuser/model", "", "a\0b", "/dev/null", "x" * 100_000]
)
def test_a_name_that_can_be_no_model_is_one_short_line(acclimate: Run, model: str) -> None:
    done = acclimate(PROMPT, "--model", model)
    assert_one_line_error(done)
    assert len(done.stderr) < 500


def test_a_circle_of_links_and_a_folder_of_nothing_are_no_models(acclimate: Run, tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert_one_line_error(acclimate(PROMPT, "--model", str(tmp_path / "circle")), "circle")
    (tmp_path / "config.json").mkdir()
    assert_one_line_error(acclimate(PROMPT, "--model", str(tmp_path)), "config.json")


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-5, float("inf"), -1.0])
def test_a_temperature_that_cannot_be_divided_by_is_refused(temperature: float) -> None:
    with pytest.raises(GenerationOptionError, match="temperature"):
        acclimate.generate(PROMPT, model="/nowhere", temperature=temperature)


def test_the_lowest_and_a_huge_temperature_draw_tokens(tiny_folder: Path) -> None:
    from acclimate.llm.text_options import LOWEST_TEMPERATURE

    loaded = load_model(tiny_folder)
    for temperature in (LOWEST_TEMPERATURE, 1e30):
        assert acclimate.generate(
            PROMPT, model=loaded, temperature=temperature, seed=1, max_new_tokens=4
        ).tokens


@pytest.mark.parametrize(
    "settings",
    few_of(
        [
            {"suppress_tokens": [10**6]},
            {"bad_words_ids": [[10**7]]},
            {"top_k": -5, "do_sample": True},
            {"repetition_penalty": "much"},
            {"num_return_sequences": 100},
            {"stop_strings": ["x"]},
            {"min_length": "long"},
            {"cache_implementation": "made-up"},
        ],
        2,
    ),
)
def test_settings_of_the_model_that_cannot_be_used_are_one_line(
    settings: dict[str, Any], folder: Path
) -> None:
    fields("generation_config.json", **settings)(folder)
    try:
        result = acclimate.generate(PROMPT, model=folder, max_new_tokens=3, temperature=1.0, seed=0)
    except AcclimateError as error:
        assert_one_plain_line(error, str(folder))
    else:
        assert len(result.tokens) == 3


def test_the_callers_own_errors_reach_the_caller_unchanged(tiny_folder: Path) -> None:
    class OwnError(Exception):
        pass

    def fail(_piece: str) -> None:
        raise OwnError("line one\nline two")

    with pytest.raises(OwnError):
        acclimate.generate(PROMPT, model=tiny_folder, max_new_tokens=5, on_text=fail)


def test_shards_that_hold_a_tensor_twice_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path, shard_size="40KB")
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    tensors = load_file(first)
    name = next(iter(load_file(second)))
    save_file(tensors | {name: torch.zeros(2)}, first)
    with pytest.raises(CorruptModelError, match="in two files"):
        check_model_folder(folder)


def test_weights_as_a_pickle_load_and_their_values_are_the_same(folder: Path, tiny_folder: Path) -> None:
    weights_as_pickle(lambda content: content)(folder)
    theirs = load_model(tiny_folder, dtype="float32").module.state_dict()
    ours = load_model(folder, dtype="float32").module.state_dict()
    assert all(torch.equal(ours[name], values) for name, values in theirs.items())


def test_a_folder_that_may_not_be_read_is_named(folder: Path) -> None:
    (folder / "config.json").chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything
    try:
        with pytest.raises((ModelNotFoundError, CorruptModelError), match="Permission denied"):
            load_model(folder)
    finally:
        os.seteuid(user)
