"""``acclimate plan`` shows how a model is split, from its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from acclimate.cli import main


def test_a_configuration_is_enough(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    assert main(["plan", str(tmp_path), "--tp", "2", "--json", "--dtype", "float32"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ranks"] == 2
    assert max(report["bytes_per_rank"]) < 0.7 * report["bytes"]
    assert all(len(parameter["ranges"]) == len(parameter["bytes"]) == 2 for parameter in report["parameters"])


def test_the_tree_joins_layers_that_are_split_alike(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(tiny_folder), "--tp", "2"]) == 0
    shown = capsys.readouterr().out
    assert "0 … 1, 2 alike" in shown
    assert "q_proj" in shown
    assert "rank 1: " in shown


def test_the_header_of_a_gguf_file_is_enough(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tiny_gguf), "--tp", "2"]) == 0
    assert "Gemma3ForCausalLM" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", ["0", "two", "1025"])
def test_an_impossible_number_of_ranks_is_refused(
    ranks: str, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(tiny_folder), "--tp", ranks]) == 2
    assert "--num_accelerators must be " in capsys.readouterr().err


def test_a_folder_without_a_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path)]) == 2
    assert "there is no config.json in it" in capsys.readouterr().err


def test_a_folder_with_two_gguf_files_is_refused_as_it_is_for_generating(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    refusals = []
    for command in (["plan", str(tmp_path)], ["generate", "hello", "--model", str(tmp_path)]):
        assert main(command) == 2
        refusals.append(capsys.readouterr().err.partition("error: ")[2])
    assert refusals[0] == refusals[1]
    assert "give the path of one: a.gguf, b.gguf" in refusals[0]
