"""A model's name is one for people, wherever its folder is."""

from __future__ import annotations

from pathlib import Path

from acclimate.llm.files.converted import model_name, write_manifest


def test_a_converted_file_keeps_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "gemma-0123456789abcdef-blocks"
    folder.mkdir()
    write_manifest(folder, {"source": "gemma-3-270m-Q4_K_M.gguf"})
    assert model_name(folder) == "gemma-3-270m-Q4_K_M"


def test_a_model_of_the_hub_has_its_id(tmp_path: Path) -> None:
    assert model_name(tmp_path / "models--google--gemma-3" / "snapshots" / "0a1b") == "google/gemma-3"


def test_a_folder_has_its_own_name_and_a_damaged_manifest_is_none(tmp_path: Path) -> None:
    assert model_name(tmp_path / "my-model") == "my-model"
    (tmp_path / "acclimate.json").write_text("[1")
    assert model_name(tmp_path) == tmp_path.name
    (tmp_path / "acclimate.json").write_text("[1]")
    assert model_name(tmp_path) == tmp_path.name
