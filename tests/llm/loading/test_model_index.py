"""The cached index of transformers' models equals transformers' own as long as its files do not change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the extra `llm` is not installed")

from acclimate.llm.loading import model_index

IMPORTS = """
import sys
from acclimate.llm.loading.model_index import kept_model_index
reads = []
if sys.argv[1] == "kept":
    import builtins
    original = builtins.open
    def watched(file, *args, **kwargs):
        reads.append(str(file))
        return original(file, *args, **kwargs)
    builtins.open = watched
    with kept_model_index():
        import transformers
else:
    import transformers
import transformers.models
from transformers.models.llama import LlamaConfig
print(sum("/models/" in name and name.endswith(".py") for name in reads))
for each in (transformers, transformers.models):
    print(sorted(each._class_to_module.items()), sorted(each._modules), sorted(each._object_missing_backend))
"""


def _started(kind: str) -> list[str]:
    command = [sys.executable, "-c", IMPORTS, kind]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.slow
def test_transformers_has_the_same_names_with_an_index_from_the_cache_and_reads_few_files() -> None:
    plain = _started("plain")
    first, second = _started("kept"), _started("kept")
    assert plain[1:] == first[1:] == second[1:]
    assert int(first[0]) > 1000
    assert int(second[0]) < 100  # those of the one model that was asked for


def test_the_key_changes_with_every_file_that_the_index_is_made_from(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    (folder / "llama").mkdir(parents=True)
    code = tmp_path / "import_utils.py"
    files = [folder / "__init__.py", folder / "llama" / "modeling_llama.py"]
    for file in (code, *files):
        file.write_text("a")

    def key() -> str:
        return model_index._key(str(folder), str(code))

    keys = [key(), key()]
    assert keys[0] == keys[1]
    for file in (code, *files):
        file.write_text("ab")
        keys.append(key())
        os.utime(file, ns=(0, 0))
        keys.append(key())
    (folder / "llama" / "tokenization_llama.py").touch()
    keys.append(key())
    files[1].unlink()
    keys.append(key())
    assert len(set(keys)) == len(keys) - 1


def test_an_index_is_read_as_it_was_written() -> None:
    index = {
        "llama": {frozenset(): {"a": {"A", "B"}}, frozenset({"torch", "vision"}): {"b": {"C"}}},
        frozenset({"tokenizers"}): {"c": set()},
        "deep": {"deeper": {frozenset(): {"d": {"D"}}}},
    }
    assert model_index._decoded(json.loads(json.dumps(model_index._encoded(index)))) == index
