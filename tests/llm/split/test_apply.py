"""Shards, whole tensors from shards, and the norm of gradients over ranks."""

from __future__ import annotations

import pytest
import torch
from odd_models import Keywords, Model
from torch import nn

from acclimate.llm.split import Split, apply_plan, make_plan, shard
from acclimate.llm.split.apply import put_together
from acclimate.llm.split.collectives import ThreadRanks, on_threads
from acclimate.llm.split.training import clip_grad_norm


def test_a_shard_is_its_ranges_in_their_order() -> None:
    split = Split("w", (6,), "columns", 0, (((4, 6), (0, 1)), ()))
    assert shard(torch.arange(6), split, 0).tolist() == [4, 5, 0]
    assert shard(torch.arange(6), split, 1).tolist() == []


def test_the_norm_that_gradients_are_clipped_by_is_the_whole_models() -> None:
    torch.manual_seed(0)
    whole = Model(Keywords)
    state = whole.state_dict()
    plan = make_plan(whole, 3)
    tokens = torch.arange(8).view(2, 4)
    whole(tokens).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 1.0)

    def work(ranks: ThreadRanks) -> float:
        model = Model(Keywords)
        model.load_state_dict(state)
        apply_plan(model, plan, ranks)
        model(tokens).square().mean().backward()
        return float(clip_grad_norm(model, plan, ranks, 1.0))

    assert on_threads(3, work) == pytest.approx([float(expected)] * 3, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_weights_are_put_together_to_the_bit(dtype: torch.dtype) -> None:
    whole = torch.tensor([-0.0, 1.0, -2.0, 0.0, -0.0], dtype=dtype)
    split = Split("w", (5,), "columns", 0, (((0, 3),), ((2, 4),), ((3, 5),)))
    for found in on_threads(
        3, lambda ranks: put_together(shard(whole, split, ranks.rank), split, ranks, whole)
    ):
        assert torch.equal(found.view(torch.uint8), whole.view(torch.uint8))
