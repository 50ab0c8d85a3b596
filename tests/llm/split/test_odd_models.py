"""Models that are not of transformers, of odd designs, are split right or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from odd_models import (
    BLOCKS,
    SPLIT,
    HeadBuffers,
    Keywords,
    LongBranch,
    LowRank,
    Model,
    OneTokenBranch,
    TiedInAnotherRole,
    Transposed,
    TwoSinks,
)
from torch import Tensor, nn

from acclimate.errors import PlanError
from acclimate.llm.split import apply_plan, make_plan
from acclimate.llm.split.apply import gather_tensors
from acclimate.llm.split.collectives import ThreadRanks, on_threads

SHAPES = ((2, 5), (1, 1), (2, 1), (1, 40), (3, 17))


def difference(model: nn.Module, size: int) -> float | None:
    """The largest relative difference of logits and gradients; ``None`` for a model that is refused."""
    try:
        plan = make_plan(model, size)
    except PlanError:
        return None
    whole = copy.deepcopy(model)
    inputs = [torch.arange(batch * length).view(batch, length) * 3 % 20 for batch, length in SHAPES]

    def run(one: nn.Module) -> tuple[list[Tensor], dict[str, Any]]:
        with torch.no_grad():
            logits = [one.eval()(tensor) for tensor in inputs]
        one(inputs[0]).square().mean().backward()
        gradients = {n: p.grad for n, p in one.named_parameters() if p.grad is not None}
        return logits, gradients

    logits, gradients = run(whole)

    def work(ranks: ThreadRanks) -> float:
        found, own = run(apply_plan(copy.deepcopy(model), plan, ranks))
        worst = max(gap(one, other) for one, other in zip(found, logits, strict=True))
        for name, tensor in gather_tensors(plan, own, ranks):
            if name in gradients:  # a module may be there that nothing calls
                worst = max(worst, gap(tensor, gradients[name]))
        return worst

    return max(on_threads(size, work))


def gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-2))


QUICK = (
    LongBranch,
    OneTokenBranch,
    HeadBuffers,
    Transposed,
    Keywords,
    TwoSinks,
    LowRank,
    TiedInAnotherRole,
)


@pytest.mark.parametrize(
    "block", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in BLOCKS]
)
def test_a_model_of_an_odd_design_is_split_right_or_refused(block: type[nn.Module]) -> None:
    torch.manual_seed(1)
    found = difference(Model(block), 2)
    assert found is None or found < 1e-4
    assert found is not None or block not in SPLIT


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"sequential": True}], ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_the_same_on_3_ranks_with_tied_blocks_and_in_a_sequence(
    block: type[nn.Module], options: dict[str, bool]
) -> None:
    torch.manual_seed(1)
    found = difference(Model(block, **options), 3)
    assert found is None or found < 1e-4
