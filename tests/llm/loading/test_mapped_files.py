"""A model whose weights are mapped from a file says so when that file is written to."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from generate_command import PROMPT
from transformers.generation.streamers import BaseStreamer
from warm_processes import WarmProcesses

from acclimate.errors import CorruptModelError
from acclimate.llm import generate, init_inference, load_model
from acclimate.llm.kernels.builder import CPUInferenceBuilder

Change = Callable[[Path], None]


@pytest.fixture
def weights(tiny_folder: Path, tmp_path: Path) -> Path:
    """The only file of weights of a model in a folder of its own."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model")) / "model.safetensors"


def truncate(path: Path) -> None:
    os.truncate(path, 8)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(64))


class Overwriting(BaseStreamer):
    """A streamer that writes to a file at each token."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, value: torch.Tensor) -> None:
        overwrite(self.path)

    def end(self) -> None:
        pass


def replace(path: Path) -> None:
    copied = path.with_name("other")
    copied.write_bytes(bytes(100))
    copied.replace(path)


@pytest.mark.parametrize("change", [pytest.param(truncate, marks=pytest.mark.slow), overwrite])
def test_the_file_that_changed_after_loading_is_named(weights: Path, change: Change) -> None:
    loaded = load_model(weights.parent, dtype="float32")
    generate(PROMPT, model=loaded, max_new_tokens=2)
    change(weights)
    with pytest.raises(CorruptModelError, match=rf"{weights} was changed while a model used"):
        generate(PROMPT, model=loaded, max_new_tokens=2)
    with pytest.raises(CorruptModelError, match=rf"{weights} was changed while a model used"):
        loaded.module.generate(torch.tensor([[1, 2]]), max_new_tokens=2)
    with pytest.raises(CorruptModelError):
        copy.deepcopy(loaded.module.mapped_files)[0].check_unchanged()


def test_a_change_during_a_text_is_an_error_of_that_text(weights: Path) -> None:
    loaded = load_model(weights.parent, dtype="float32")
    with pytest.raises(CorruptModelError, match=rf"{weights} was changed while a model used"):
        loaded.module.generate(torch.tensor([[1, 2]]), max_new_tokens=2, streamer=Overwriting(weights))


def test_a_file_that_was_replaced_or_is_not_used_any_more_is_no_error(weights: Path) -> None:
    loaded = load_model(weights.parent, dtype="float32")
    first = generate(PROMPT, model=loaded, max_new_tokens=4).tokens
    half = load_model(weights.parent, dtype="bfloat16")  # converted, and so copied
    whole = init_inference(weights.parent, dtype="float32")  # read
    replace(weights)
    assert generate(PROMPT, model=loaded, max_new_tokens=4).tokens == first
    assert loaded.module.mapped_files
    assert half.module.mapped_files == whole.mapped_files == ()


# Truncates the only file of weights as soon as they are loaded, before the first token.
TRUNCATED = """
import os, sys
from acclimate.llm.decode import loop
from acclimate.cli import main
path = sys.argv.pop(1)
def truncated(*arguments, **options):
    os.truncate(path, 8)
    return original(*arguments, **options)
original, loop.lean_sample = loop.lean_sample, truncated
sys.exit(main(sys.argv[1:]))
"""


def test_a_command_whose_file_is_truncated_during_a_text_names_it_in_one_line(
    weights: Path, warm: WarmProcesses
) -> None:
    reason = CPUInferenceBuilder().incompatibility()
    if reason is not None:
        pytest.skip(reason)
    arguments = ("generate", PROMPT, "--model", str(weights.parent), "--dtype", "float32")
    done = warm.run(str(weights), *arguments, code=TRUNCATED)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert line.startswith(f"acclimate generate: error: {weights} was cut short")
