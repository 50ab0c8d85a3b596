"""Every way of loading a model accepts the same superfluous tensors, and refuses the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_command import PROMPT, Run, assert_one_line_error
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model

from acclimate.cli import main
from acclimate.errors import CorruptModelError
from acclimate.llm import init_inference, load_model, load_split_model
from quick_parameters import quick

WAYS: dict[str, Callable[..., Any]] = {
    "one rank": lambda folder, **options: load_model(folder, dtype="float32", **options),
    "quantised": lambda folder, **options: load_model(folder, quantize="int8", **options),
    "split": lambda folder, **options: load_split_model(folder, dtype="float32", **options),
    "init_inference": lambda folder, **options: init_inference(folder, dtype="float32", **options),
}
LEFTOVERS = {
    "transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool),
    "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
    "transformer.h.1.attn.rotary_emb.inv_freq": torch.ones(4),
    "transformer.position_ids": torch.arange(4),
}


def with_tensors(folder: Path, more: dict[str, torch.Tensor]) -> Path:
    save_tiny_model("gpt2", folder)
    weights = folder / "model.safetensors"
    save_file(load_file(weights) | more, weights, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_buffers_that_earlier_releases_stored_are_accepted(way: str, tmp_path: Path) -> None:
    WAYS[way](with_tensors(tmp_path, LEFTOVERS))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", quick(("score.weight", "lm_head.bias", "transformer.h.7.attn.scores"), "score.weight")
)
def test_a_tensor_without_a_place_is_refused_unless_the_caller_ignores_it(
    way: str, name: str, tmp_path: Path
) -> None:
    folder = with_tensors(tmp_path, {name: torch.ones(2, 32)})
    with pytest.raises(CorruptModelError, match=f"leaves out: {name}"):
        WAYS[way](folder)
    WAYS[way](folder, ignore_extra=[name])


ADVISED = ("--ignore_extra", "score.*,v_head.bias")


@pytest.fixture
def with_heads(tmp_path: Path) -> str:
    return str(with_tensors(tmp_path, {"score.weight": torch.ones(2, 32), "v_head.bias": torch.ones(1)}))


def test_generate_offers_what_its_error_advises(acclimate: Run, with_heads: str) -> None:
    assert_one_line_error(acclimate(PROMPT, "--model", with_heads), "score.weight", "--ignore_extra")
    done = acclimate(PROMPT, "--model", with_heads, "--max-new-tokens", "1", *ADVISED)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_bench_offers_what_its_error_advises(with_heads: str, capsys: pytest.CaptureFixture[str]) -> None:
    bench = ["bench", with_heads, "--prompt-tokens", "4", "--new-tokens", "2", "--sequences", "1"]
    assert main(bench) == 2
    assert "--ignore_extra" in capsys.readouterr().err
    assert main([*bench, *ADVISED]) == 0
