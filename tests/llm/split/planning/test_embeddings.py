"""Embeddings that are split by tokens give what whole ones do, and refuse what whole ones refuse."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from acclimate.llm.split import Plan, apply_plan, make_plan
from acclimate.llm.split.collectives import ThreadRanks, on_threads


class Model(nn.Module):
    """An embedding, one MLP and a head."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.tokens = table
        self.perceptron = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
        self.head = nn.Linear(6, table.weight.shape[0], bias=False)
        self.head.weight = table.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        out: Tensor = self.head(x + self.perceptron(x))
        return out


class WithScale(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


class WithTokenBefore(nn.Embedding):
    """Each token gets half of the one before."""

    def forward(self, input: Tensor) -> Tensor:
        found = super().forward(input)
        return found + 0.5 * found.roll(1, 1)


class OfMagnitude(nn.Embedding):
    """Adds a number that only the table's largest row has."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / self.weight.norm(dim=-1).max()


class Hashing(nn.Embedding):
    """Takes any token."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input % self.num_embeddings)


def parts_give(model: nn.Module, plan: Plan, tokens: Tensor) -> list[Tensor | str]:
    def work(ranks: ThreadRanks) -> Tensor | str:
        part = apply_plan(copy.deepcopy(model), plan, ranks)
        try:
            with torch.no_grad():
                found: Tensor = part(tokens)
                return found
        except IndexError as error:
            return str(error)

    return on_threads(plan.size, work)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow), 25])
@pytest.mark.parametrize("token", [20, pytest.param(21, marks=pytest.mark.slow), 1 << 40, -1])
def test_a_token_beyond_the_vocabulary_is_the_same_error_on_all_ranks(token: int, size: int) -> None:
    model = Model(nn.Embedding(20, 6))
    tokens = torch.tensor([[1, token, 19]])
    with pytest.raises(IndexError) as whole:
        model(tokens)
    assert parts_give(model, make_plan(model, size), tokens) == [str(whole.value)] * size


def test_more_ranks_than_tokens_give_the_same() -> None:
    model = Model(nn.Embedding(3, 6))
    tokens = torch.tensor([[0, 2, 1]])
    for found in parts_give(model, make_plan(model, 5), tokens):
        torch.testing.assert_close(found, model(tokens).detach())


@pytest.mark.parametrize(
    ("kind", "is_split"),
    [(WithScale, True), (WithTokenBefore, False), (OfMagnitude, False), (Hashing, False)],
)
def test_an_embedding_with_code_of_its_own_is_split_right_or_whole(
    kind: type[nn.Embedding], is_split: bool
) -> None:
    torch.manual_seed(0)
    model = Model(kind(20, 6))
    plan = make_plan(model, 2)
    assert (plan.splits["tokens.weight"].kind == "vocabulary") == is_split
    tokens = torch.tensor([[0, 19, 10, 9, 11], [7, 7, 12, 1, 0]])
    for found in parts_give(model, plan, tokens):
        torch.testing.assert_close(found, model(tokens).detach())


@pytest.mark.parametrize("options", [{"max_norm": 0.1}, {"scale_grad_by_freq": True}])
def test_an_embedding_that_looks_at_all_its_tokens_stays_whole(options: dict[str, float]) -> None:
    plan = make_plan(Model(nn.Embedding(20, 6, **options)), 2)  # type: ignore[arg-type]
    assert plan.splits["tokens.weight"].kind == plan.splits["head.weight"].kind == "replicated"
