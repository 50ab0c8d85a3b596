"""A split model gives the whole model's results, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from architectures import ARCHITECTURES, FURTHER, MULTI_HEAD, REFUSED, meta_model, tiny_model
from splitting import compare, worst_gradient

from acclimate.errors import PlanError
from acclimate.llm.split import apply_plan, make_plan
from acclimate.llm.split.collectives import ThreadRanks, on_threads

# One of each kind: grouped queries, fused layouts, experts, sinks, latent attention, wide norms.
NAMED = [
    "gpt2",
    "deepseek_v3",
]
QUICK = ("gpt2",)


def names(quick: Sequence[str], without: Sequence[str] = ()) -> list[Any]:
    chosen = [n for n in ARCHITECTURES if n not in without]
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in chosen]


@pytest.mark.parametrize("name", names(NAMED))
def test_a_model_on_2_ranks_gives_the_logits_text_and_weights_of_the_whole_one(name: str) -> None:
    found = compare(name, 2)
    assert found.error < 1e-4
    assert found.same_text
    assert found.same_weights
    assert found.largest_share <= 0.60


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_ranks_compute_their_own_heads_only(name: str) -> None:
    plan = make_plan(meta_model(name), 2)
    assert not [n for n, change in plan.modules.items() if any(change.expands)]


# 5: more ranks than heads
@pytest.mark.parametrize("size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4)), 5])
@pytest.mark.parametrize("name", names(QUICK))
def test_a_model_on_more_ranks_gives_the_same(name: str, size: int) -> None:
    found = compare(name, size)
    assert found.error < 1e-4
    assert found.same_text
    assert found.same_weights
    assert found.largest_share <= 0.60


@pytest.mark.parametrize("name", names(("qwen3",), without=MULTI_HEAD))
def test_a_model_with_one_key_value_head_gives_the_same(name: str) -> None:
    found = compare(name, 2, num_key_value_heads=1)
    assert found.error < 1e-4
    assert found.same_text
    assert found.same_weights
    assert found.largest_share <= 0.60


@pytest.mark.parametrize("name", names(("deepseek_v3",)))
def test_the_gradients_of_a_split_model_are_those_of_the_whole_one(name: str) -> None:
    assert worst_gradient(name, 2) < 1e-3


def test_copies_of_a_key_value_head_get_the_sum_of_their_gradients() -> None:
    assert worst_gradient("llama", 3) < 1e-3


def test_parameters_that_were_frozen_when_the_model_was_split_get_the_same_gradients_later() -> None:
    assert worst_gradient("llama", 3, is_frozen_first=True) < 1e-3


def test_modules_whose_state_does_not_split_are_split_one_by_one() -> None:
    found = compare("rwkv", 2)
    assert found.error < 1e-4
    assert found.same_text
    assert found.largest_share <= 0.60
    assert "rwkv.blocks.0.attention" not in found.plan.modules


def test_linear_modules_in_code_that_uses_weights_are_split_one_by_one() -> None:
    plan = make_plan(meta_model("mamba"), 2)
    mixer = "backbone.layers.0.mixer"
    assert plan.splits[f"{mixer}.in_proj.weight"].kind == "columns"
    assert plan.splits[f"{mixer}.dt_proj.weight"].kind == "replicated"  # its weight is used


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in FURTHER])
def test_another_model_is_split_right_or_refused(name: str) -> None:
    try:
        found = compare(name, 2)
    except PlanError:
        assert name in REFUSED
        return
    assert found.error < 1e-4
    assert found.same_text
    assert found.same_weights


@pytest.mark.slow
def test_layers_that_use_the_keys_and_values_of_another_layer_are_split_right() -> None:
    layers = 4
    found = compare(
        "gemma3n_text", 2, num_hidden_layers=layers, num_kv_shared_layers=2, intermediate_size=[128] * layers,
        activation_sparsity_pattern=[0.0] * layers, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    assert found.error < 1e-4
    assert found.same_text
    assert found.same_weights


def test_padded_prompts_are_right_where_ranks_share_the_one_key_value_head() -> None:
    """With a mask, attention repeats key/value heads by a number that it does not use without one."""
    model = tiny_model("llama", num_key_value_heads=1)
    plan = make_plan(model, 2)
    tokens = torch.arange(18).view(2, 9) * 7 % 150 + 3
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0

    def logits(of: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = of(input_ids=tokens, attention_mask=mask).logits
        return found[:, -1]

    def split(ranks: ThreadRanks) -> torch.Tensor:
        return logits(apply_plan(copy.deepcopy(model), plan, ranks))

    for found in on_threads(2, split):
        assert torch.allclose(found, logits(model), atol=1e-4)
