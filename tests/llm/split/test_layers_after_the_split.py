"""What the hooks of a split model use: each module once, its own configuration, gradients that come later."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from odd_models import Model, Odd
from torch import Tensor, nn
from torch.nn import functional

from acclimate.errors import PlanError
from acclimate.llm.split import apply_plan, make_plan
from acclimate.llm.split.collectives import ThreadRanks, on_threads
from acclimate.llm.split.layers.changes import follow_config, set_attribute


class Block(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class WithTwoNames(nn.Module):
    """A wrapper that keeps the embedding of the model in it, and calls it, as peft's soft prompts do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = Model(Block)
        self.words = self.inner.tokens

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.inner(input_ids)
        return out


def results(model: nn.Module) -> tuple[Any, list[Tensor]]:
    """What a model gives on two ranks."""
    plan = make_plan(model, 2)
    tokens = torch.arange(6).view(2, 3)

    def work(ranks: ThreadRanks) -> Tensor:
        with torch.no_grad():
            found: Tensor = apply_plan(copy.deepcopy(model), plan, ranks)(tokens)
        return found

    return plan, on_threads(2, work)


def test_a_module_with_two_names_is_changed_once() -> None:
    torch.manual_seed(1)
    model = WithTwoNames()
    plan, found = results(model)
    assert {"inner.tokens", "words"} <= set(plan.modules)
    with torch.no_grad():
        expected = model(torch.arange(6).view(2, 3))
    for logits in found:
        assert torch.allclose(logits, expected, atol=1e-4)


class Wrapper(nn.Module):
    """Passes on what it gets, as peft's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model(Block)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("use_cache", None)
        out: Tensor = self.inner(*args, **kwargs)
        return out


def test_a_wrapper_that_names_no_arguments_is_traced() -> None:
    torch.manual_seed(1)
    plan = make_plan(Wrapper(), 2)
    assert plan.splits["inner.layers.0.up.weight"].kind == "columns"


def test_a_split_model_is_not_planned_again() -> None:
    model = Model(Block)
    plan = make_plan(model, 2)

    def work(ranks: ThreadRanks) -> None:
        make_plan(nn.Sequential(apply_plan(copy.deepcopy(model), plan, ranks)), 2)

    with pytest.raises(PlanError, match="already split over 2 ranks; load the whole model again"):
        on_threads(2, work)


class Config:
    def __init__(self) -> None:
        self.heads, self.attention = 4, "sdpa"


class Configured(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(self) -> tuple[int, str]:
        return self.config.heads, self.config.attention


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.layer = Configured(self.config)

    def forward(self) -> tuple[int, str]:
        found: tuple[int, str] = self.layer()
        return found


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_ranks_configuration_takes_later_settings_of_the_models(is_copy: bool) -> None:
    model = Outer()
    set_attribute(model.layer, "config.heads", 2)
    follow_config(model.layer, model.config, frozenset({"heads"}))
    first = model
    if is_copy:
        model = copy.deepcopy(model)
    model.config.attention = "eager"
    model.config.heads = 8
    assert model() == (2, "eager")
    assert first() == ((2, "sdpa") if is_copy else (2, "eager"))
