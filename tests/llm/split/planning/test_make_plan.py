"""Plans: their content, whose mapping they follow, and what they refuse."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from acclimate.errors import PlanError
from acclimate.llm.split import make_plan
from acclimate.llm.split.apply import apply_plan, gather_tensors
from acclimate.llm.split.collectives import ThreadRanks, on_threads


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Mixer(nn.Module):
    """Every column of ``down`` depends on every column of ``up``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).softmax(-1))
        return out


class Model(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 6)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(6, 20, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def plan_of(user: Any = None, block: type[nn.Module] = Perceptron, size: int = 3) -> Any:
    return make_plan(Model(block), size, user)


def test_any_model_is_split_by_what_flows_where() -> None:
    plan = plan_of()
    assert plan.splits["layers.1.up.weight"].kind == "columns"
    assert plan.splits["layers.1.up.weight"].parts == (((0, 4),), ((4, 7),), ((7, 10),))
    assert (plan.splits["layers.1.down.weight"].kind, plan.splits["layers.1.down.weight"].dim) == ("rows", 1)
    assert plan.splits["tokens.weight"].kind == plan.splits["head.weight"].kind == "vocabulary"
    assert set(plan.source.values()) == {"structure"}


def test_a_bias_of_rows_is_on_one_rank_only() -> None:
    assert plan_of().splits["layers.0.down.bias"].parts == (((0, 6),), (), ())


class Raw(nn.Module):
    """Its matrix is no linear module's."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.matrix).softmax(-1)


def test_what_cannot_be_split_is_refused_with_module_reason_and_mapping() -> None:
    with pytest.raises(PlanError) as refused:
        plan_of(block=Raw)
    reason = "Raw is not a linear module, and its use of matrix cannot be traced"
    assert f"layers.0 ({reason}" in str(refused.value)
    assert '"layers.*": "replicated"' in str(refused.value)


def test_the_mapping_of_a_refusal_is_accepted() -> None:
    plan = plan_of({"layers.*": "replicated"}, Raw)
    assert plan.splits["layers.0.matrix"].kind == "replicated"


def test_modules_whose_columns_depend_on_each_other_are_split_one_by_one() -> None:
    plan = plan_of(block=Mixer)
    assert plan.modules["layers.0.up"].role == plan.modules["layers.0.down"].role == "head"


def test_a_mapping_that_is_not_right_is_refused() -> None:
    with pytest.raises(PlanError, match=r"layers\.0\.up cannot be split by experts, as the mapping asks"):
        plan_of({"layers.0.up": "experts"})


@pytest.mark.parametrize(
    ("block", "mapping"),
    [
        (Mixer, {"layers.*.up": "columns", "layers.*.down": "rows"}),
        (Perceptron, {"layers.0.up": "rows", "layers.1.down": "columns"}),
        (Perceptron, {"layers.0.down": "vocabulary", "head": "rows"}),
    ],
)
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 7))])
def test_a_mapping_forces_a_split_that_gives_the_same(
    block: type[nn.Module], mapping: dict[str, str], size: int
) -> None:
    plan = plan_of(mapping, block, size)
    for pattern, kind in mapping.items():
        name = pattern.replace("*", "0")
        kind = "columns" if kind == "vocabulary" else kind
        assert (plan.splits[f"{name}.weight"].kind, plan.source[name]) == (kind, "user")
    torch.manual_seed(0)
    whole = Model(block)
    tokens = torch.arange(8).view(2, 4)
    expected = whole(tokens)
    expected.square().mean().backward()
    gradients = {n: p.grad for n, p in whole.named_parameters()}

    def work(ranks: ThreadRanks) -> None:
        model = copy.deepcopy(whole)
        model.zero_grad()
        apply_plan(model, plan, ranks)
        found = model(tokens)
        found.square().mean().backward()
        torch.testing.assert_close(found, expected)
        own = {n: p.grad for n, p in model.named_parameters()}
        for name, tensor in gather_tensors(plan, own, ranks):
            torch.testing.assert_close(tensor, gradients[name], msg=lambda text, n=name: f"{n}: {text}")

    on_threads(size, work)


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"No module fits the pattern 'blocks\.\*\.up'.* Did you mean 'layers\.0\.up'"
    ):
        plan_of({"blocks.*.up": "columns"})


def test_deepspeeds_layer_specs_are_read() -> None:
    specs = [
        {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.down\.weight$"], "partition_type": "row"},
    ]
    plan = plan_of({"tensor_parallel": {"partition_config": {"layer_specs": specs}}})
    assert plan.source["layers.0.up"] == "user"
    assert plan.splits["head.weight"].kind == "replicated"


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "setting",
    [
        torch.no_grad(),
        torch.inference_mode(),
        torch.device("meta"),
        torch.autocast("cpu", torch.bfloat16),
        default_dtype(torch.bfloat16),
    ],
    ids=["no_grad", "inference_mode", "device", "autocast", "default_dtype"],
)
def test_a_plan_does_not_depend_on_what_the_caller_has_set(setting: Any) -> None:
    model = Model(Perceptron)
    expected = make_plan(model, 3)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with setting:
        assert make_plan(model, 3) == expected
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_made_in_inference_mode_is_planned() -> None:
    with torch.inference_mode():
        model = Model(Perceptron)
    assert make_plan(model, 3) == plan_of()


PLANS = """
import sys
import torch
from architectures import meta_model
from acclimate.llm.split import make_plan

torch.manual_seed(int(sys.argv[1]))
torch.set_num_threads(int(sys.argv[1]))
for name in ("gpt2", "mixtral", "deepseek_v3"):
    plan = make_plan(meta_model(name), 3)
    print(plan.splits, plan.modules, plan.shared, sorted(plan.partial))
"""


@pytest.mark.slow
def test_all_processes_make_the_same_plan() -> None:
    def made(seed: int) -> str:
        settings = {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-c", PLANS, str(seed)]
        return subprocess.run(
            command, env={**os.environ, **settings}, check=True, capture_output=True, text=True
        ).stdout

    one, other = made(1), made(2)
    assert one == other
    assert len(one) > 1000


def test_plans_made_at_the_same_time_leave_the_default_dtype_and_the_random_numbers() -> None:
    first_is_in, second_is_in, first_has_ended = (threading.Event() for _ in range(3))
    tokens = torch.arange(4).view(1, 4)

    def example_of_the_first(model: nn.Module) -> Tensor:
        first_is_in.set()
        second_is_in.wait(0.3)
        return cast("Tensor", model(tokens))

    def example_of_the_second(model: nn.Module) -> Tensor:
        second_is_in.set()
        first_has_ended.wait(0.3)
        return cast("Tensor", model(tokens))

    def plan_first() -> None:
        make_plan(model, 1, example=example_of_the_first)
        first_has_ended.set()

    torch.manual_seed(7)
    model = Model(Perceptron)
    before, dtype = torch.get_rng_state(), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        thread = threading.Thread(target=plan_first)
        thread.start()
        first_is_in.wait()
        make_plan(model, 1, example=example_of_the_second)
        thread.join()
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(dtype)
    assert torch.get_rng_state().equal(before)
