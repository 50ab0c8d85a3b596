"""Kinds of programs that are matched to the native step, each with the tokens that transformers computes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import tiny_model

import acclimate
from acclimate.llm.decode import loop
from acclimate.llm.decode.proof import distance
from quick_parameters import quick

PROMPT = torch.arange(3, 12)[None]


def check_tokens(model: Any, taken: list[bool]) -> Any:
    """Compares the tokens of the native step with transformers', for one sequence and for a padded batch.

    Returns the model that took the native step.
    """
    batch = PROMPT.repeat(2, 1)
    mask = torch.ones_like(batch)
    mask[1, :3] = 0
    calls = ({"input_ids": PROMPT}, {"input_ids": batch * mask, "attention_mask": mask})
    expected = [
        model.generate(**call, max_new_tokens=60, do_sample=False, eos_token_id=None) for call in calls
    ]
    made = acclimate.init_inference(copy.deepcopy(model))
    assert loop.step_kind(made) == "native"
    for call, tokens in zip(calls, expected, strict=True):
        found = made.generate(**call, max_new_tokens=60, do_sample=False, eos_token_id=None)
        assert torch.equal(found, tokens)
    assert taken == [True, True]
    return made


@pytest.mark.slow
def test_attention_sinks_are_the_same_in_a_prompt_and_in_a_step(taken: list[bool]) -> None:
    check_tokens(
        tiny_model("granite_swa", sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
        taken,
    )


def test_queries_are_multiplied_by_a_function_of_the_position(taken: list[bool]) -> None:
    lean = loop.lean_decoder(check_tokens(tiny_model("ministral3"), taken))
    assert lean is not None
    numbers = lean.decoder.factors[0](torch.tensor([0, 7, 8, 40]))
    assert torch.allclose(numbers[:, 0], 1 + 0.4 * torch.log(torch.tensor([1.0, 1.0, 2.0, 6.0])))
    assert [layer.mixer.query_factors for layer in lean.decoder.layers] == [0, 0]


def test_a_rotation_by_negative_angles_and_a_normalized_embedding_are_read(taken: list[bool]) -> None:
    lean = loop.lean_decoder(check_tokens(tiny_model("nanochat"), taken))
    assert lean is not None
    (table,) = lean.decoder.tables
    assert bool((table(torch.tensor([1]))[1] < 0).all())  # the sines
    assert lean.decoder.embedding_norm is not None
    assert loop.step_kind(acclimate.init_inference(tiny_model("nanochat").bfloat16())) == "native"


def test_an_operator_that_fails_on_fake_tensors_leaves_no_lines_on_stderr(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    model = acclimate.init_inference(tiny_model("bloom"))
    capfd.readouterr()
    with caplog.at_level("INFO", logger="acclimate.llm"):
        assert loop.step_kind(model) == "transformers"
    assert "cannot be captured" in caplog.text
    assert capfd.readouterr().err == ""


def test_a_size_that_becomes_a_number_is_a_reason_to_refuse(caplog: pytest.LogCaptureFixture) -> None:
    model = acclimate.init_inference(tiny_model("mamba"))
    with caplog.at_level("INFO", logger="acclimate.llm"):
        assert loop.step_kind(model) == "transformers"
    assert "its program holds for one size only" in caplog.text


def test_a_step_whose_logits_are_nan_or_of_another_shape_is_infinitely_far() -> None:
    expected = torch.ones(2, 4)
    assert distance(torch.full((2, 4), float("nan")), expected) == float("inf")
    assert distance(torch.ones(2, 3), expected) == float("inf")
    assert distance(expected.clone(), expected) == 0.0


def with_a_sharper_mlp(name: str, number: int) -> Any:
    """Returns a tiny model whose layer of a number has an MLP with a further operator."""
    model = tiny_model(name)
    mlp = model.model.layers[number].mlp

    class Sharper(type(mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = torch.sigmoid(self.gate_proj(x)) * self.up_proj(x)
            found: torch.Tensor = self.down_proj(inner)
            return found

    mlp.__class__ = Sharper
    return model


REASONS: dict[str, Callable[[], tuple[Any, str]]] = {
    "attention of its own": lambda: (
        tiny_model("gpt_neo"),
        "layer 1: its attention is computed with bmm, softmax, add, not by an attention function",
    ),
    "attention and more": lambda: (
        tiny_model("diffllama"),
        "layer 1: its attention is followed by mul, a normalization, sub",
    ),
    "experts": lambda: (tiny_model("phimoe"), "layer 1: experts are chosen with cat"),
    "a recurrent state": lambda: (
        tiny_model("jamba"),
        "layer 0: its recurrent state is computed with mul, add, silu, in a way",
    ),
    "another mlp": lambda: (
        with_a_sharper_mlp("llama", 0),
        "layer 0: its MLP is computed with mul, sigmoid, in a way",
    ),
    "an operator without symbolic sizes": lambda: (tiny_model("bloom"), "(modeling_bloom.py, line "),
}


@pytest.mark.parametrize("name", quick(tuple(REASONS), "another mlp"))
def test_the_reason_names_the_layer_and_what_it_computes(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, reason = REASONS[name]()
    with caplog.at_level("INFO", "acclimate.llm"):
        assert loop.step_kind(acclimate.init_inference(model)) == "transformers"
    assert reason in caplog.text
