"""Logits that are infinite or NaN: an error wherever a text is generated, and never a text."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import tiny_model
from changed_weights import changed

import acclimate
from acclimate.errors import LogitsError
from acclimate.llm.decode.loop import step_kind

PROMPT = torch.arange(3, 12)[None]
NATIVE, OWN = "llama", "bloom"
"""A model with a native step, and one that only transformers can run."""
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 5},
    "beams": {"do_sample": False, "num_beams": 3},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "scores": {"do_sample": False, "return_dict_in_generate": True, "output_scores": True},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 2},
}


@functools.cache
def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose weights have their values again after each test."""
    model = acclimate.init_inference(tiny_model(name, tie_word_embeddings=False).to(dtype))
    assert step_kind(model) == ("native" if name == NATIVE else "transformers")
    return model


@contextmanager
def damaged(name: str, dtype: torch.dtype, row: int, value: float) -> Iterator[Any]:
    """A model of which one token's logit is not finite."""
    model = model_of(name, dtype)
    head = model.get_output_embeddings().weight
    with changed(head):
        head.data[row] = value
        head.data[row - 1] = -value
        yield model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", [NATIVE, OWN])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_one_logit_that_is_not_finite_is_an_error(
    name: str, way: str, value: float, dtype: torch.dtype
) -> None:
    with damaged(name, dtype, 77, value) as model, pytest.raises(LogitsError, match=r"inf|nan"):
        model.generate(PROMPT, max_new_tokens=4, **WAYS[way])


@pytest.mark.parametrize("batch", [1, 3])
def test_nan_in_the_last_sequence_of_a_batch_is_an_error(batch: int) -> None:
    model = model_of(NATIVE)
    embedding = model.get_input_embeddings().weight
    prompt = PROMPT.repeat(batch, 1)
    prompt[-1, 4] = 90
    with changed(embedding):
        embedding.data[90] = torch.nan
        with pytest.raises(LogitsError):
            model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("name", [NATIVE, pytest.param(OWN, marks=pytest.mark.slow)])
def test_a_model_whose_values_overflow_in_a_layer_is_an_error_not_a_text_of_padding(name: str) -> None:
    model = tiny_model(name)
    for parameter in model.get_decoder().parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(torch.inf)
    made = acclimate.init_inference(model)
    for options in WAYS.values():
        with pytest.raises(LogitsError, match="damaged"):
            made.generate(PROMPT, max_new_tokens=4, **options)


@pytest.mark.parametrize("name", [NATIVE, OWN])
@pytest.mark.parametrize("way", ["greedy", "sampling"])
def test_processors_may_exclude_tokens(name: str, way: str) -> None:
    found = model_of(name).generate(
        PROMPT, max_new_tokens=4, suppress_tokens=list(range(150)), **WAYS[way]
    )  # fmt: skip
    assert int(found[0, 9:].min()) >= 150


@pytest.mark.parametrize("name", [NATIVE, pytest.param(OWN, marks=pytest.mark.slow)])
def test_a_model_may_exclude_tokens_itself(name: str) -> None:
    model = tiny_model(name, tie_word_embeddings=False)
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(160))
    head.bias.data[20:] = -torch.inf
    made = acclimate.init_inference(model)
    assert int(made.generate(PROMPT, max_new_tokens=4, do_sample=False)[0, 9:].max()) < 20
    head.bias.data[:] = -torch.inf
    with pytest.raises(LogitsError):
        made.generate(PROMPT, max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("name", [NATIVE, OWN])
def test_who_asks_transformers_to_replace_such_logits_gets_a_text(name: str) -> None:
    with damaged(name, torch.float32, 77, torch.nan) as model:
        found = model.generate(PROMPT, max_new_tokens=4, do_sample=False, remove_invalid_values=True)
    assert found.shape == (1, 13)
