"""Models that their user changed after they were made: hooks, other functions, wrappers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from odd_models import HIDDEN, LargeNumber, Model, Odd
from test_odd_models import difference
from torch import Tensor, nn
from torch.nn import functional

from acclimate.errors import PlanError
from acclimate.llm.split import make_plan
from quick_parameters import few_of


class Block(Odd):
    """An MLP whose activation is a function that can be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = functional.gelu

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.activation(self.up(x)))
        return out


def steer(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Adds other numbers to each column."""
    return output + torch.arange(output.shape[-1])


def switch_off(first: int, last: int, module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Some columns count no more."""
    changed = inputs[0].clone()
    changed[..., first:last] = 0
    return (changed,)


def steered(model: Any) -> None:
    model.layers[0].up.register_forward_hook(steer)


def steered_after_the_sum(model: Any) -> None:
    model.layers[1].down.register_forward_hook(steer)


def steered_logits(model: Any) -> None:
    model.head.register_forward_hook(steer)


def steered_embedding(model: Any) -> None:
    model.tokens.register_forward_hook(steer)


def without_some_columns(model: Any) -> None:
    model.layers[0].down.register_forward_pre_hook(partial(switch_off, 1, HIDDEN // 2 + 1))


def with_another_function(model: Any) -> None:
    model.layers[0].activation = partial(functional.softmax, dim=-1)


def with_a_forward_of_its_own(model: Any) -> None:
    up = model.layers[0].up
    up.forward = lambda x: functional.linear(x, up.weight, up.bias).softmax(-1)


def with_a_bound_forward(model: Any) -> None:
    """As Accelerate's hooks do it."""
    for module in (model.layers[0].up, model.layers[1].down):
        module.forward = partial(type(module).forward, module)


@pytest.mark.parametrize(
    ("change", "is_split"),
    few_of(
        [
            (steered, True),
            (steered_after_the_sum, True),
            (steered_logits, True),
            (steered_embedding, True),
            (without_some_columns, None),
            (with_another_function, None),
            (with_a_forward_of_its_own, None),
            (with_a_bound_forward, True),
        ],
        2,
    ),
)
def test_a_change_of_one_layer_is_seen(change: Callable[[Any], None], is_split: bool | None) -> None:
    torch.manual_seed(1)
    model = Model(Block)
    change(model)
    found = difference(model, 2)
    assert found is None or found < 1e-4
    assert found is not None or is_split is None


class Wrapper(nn.Module):
    """A model that has another one in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model(Block)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.inner(input_ids)
        return out


class WithNorm(nn.Module):
    """The head gets a normalized sum of what the last block gives and what went past it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2)
        )
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 20, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


@pytest.mark.parametrize("kind", [Wrapper, WithNorm])
def test_a_model_that_does_not_name_its_embeddings_is_split_right(kind: type[nn.Module]) -> None:
    torch.manual_seed(1)
    model: Any = kind()
    found = difference(Around(model) if kind is WithNorm else model, 2)
    assert found is not None
    assert found < 1e-4


class Around(nn.Module):
    """Calls a model, so that its linear modules are not the outermost module's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.model(input_ids)
        return out


def test_code_that_may_branch_on_split_numbers_gets_all_of_them() -> None:
    assert make_plan(Model(LargeNumber), 2).modules["layers.0.up"].role == "head"


@pytest.mark.parametrize("read", [Tensor.tolist, Tensor.numpy, np.asarray])
def test_numbers_that_are_read_without_an_operator_are_seen(read: Callable[[Tensor], Any]) -> None:
    class Branching(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            if np.max(read(hidden.detach().abs())) > 100:
                hidden = hidden / 2
            out: Tensor = x + self.down(hidden)
            return out

    assert make_plan(Model(Branching), 2).modules["layers.0.up"].role == "head"


def scripted() -> nn.Module:
    model: Any = Model(Block)
    model.layers[0] = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
    return model  # type: ignore[no-any-return]


def of_no_leaf() -> nn.Module:
    model = Model(Block)
    del model.layers[0].up.weight
    model.layers[0].up.weight = torch.ones(4, 4, requires_grad=True) * 2
    return copy.copy(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made", [scripted, of_no_leaf])
def test_a_model_that_cannot_be_copied_or_watched_is_refused(made: Callable[[], nn.Module]) -> None:
    with pytest.raises(PlanError, match="no copy of it can be traced"):
        make_plan(made(), 2)


class Steep(Odd):
    """The last digits of 32 bits decide about the result."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.down(functional.gelu(self.up(x))) * 1e5)


class SteepAndWrong(Odd):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(functional.gelu(self.up(x)))
        return x + torch.sin(hidden * 1e5) + self.up.out_features


def test_a_difference_that_comes_from_rounding_alone_is_no_reason_to_refuse() -> None:
    torch.manual_seed(1)
    plan = make_plan(Model(Steep), 2)
    assert plan.splits["layers.0.up.weight"].kind == "columns"
    with pytest.raises(PlanError, match="gives other results on 2 ranks"):
        make_plan(Model(SteepAndWrong), 2)
