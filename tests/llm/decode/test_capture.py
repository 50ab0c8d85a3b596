"""The capture of a program: torch computes symbolic sizes once for calls that are alike."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import tiny_model

import acclimate
from acclimate.llm.decode import fake_calls
from acclimate.llm.decode.loop import step_kind

aten = torch.ops.aten


@pytest.fixture
def fakes() -> fake_calls.FakeTensors:
    return fake_calls.FakeTensors()


@pytest.fixture
def inputs(fakes: fake_calls.FakeTensors) -> Iterator[Callable[[], Tensor]]:
    """Makes tensors without content, whose first two sizes are symbols."""
    with torch.no_grad(), fakes.mode:
        yield lambda: torch.zeros((*fakes.sizes, 64))


@pytest.fixture
def calls(fakes: fake_calls.FakeTensors) -> fake_calls.FakeCalls:
    return fake_calls.FakeCalls(fakes)


def layout(tensor: Tensor) -> tuple[Any, ...]:
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return (*map(fake_calls.expression, sizes), tensor.dtype, tensor.device)


CALLS: dict[str, tuple[Any, Callable[[Tensor], tuple[Any, ...]]]] = {
    "transposed": (aten.transpose.int, lambda x: (x, 1, 2)),
    "in heads": (aten.view.default, lambda x: (x, [x.shape[0], x.shape[1], 4, 16])),
    "a part": (aten.slice.Tensor, lambda x: (x, -1, 8, 24)),
    "a sum of rows": (aten.mul.Tensor, lambda x: (x, x[..., :1])),
    "turned": (aten.mul.Tensor, lambda x: (x.transpose(1, 2), x.transpose(1, 2))),
    "together": (aten.cat.default, lambda x: ([x[..., 32:], x[..., :32]], -1)),
    "a half": (aten.pow.Tensor_Scalar, lambda x: (x, 0.5)),
    "in bfloat16": (aten._to_copy.default, lambda x: (x,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_of_like_calls_have_the_sizes_and_strides_that_torch_computes(
    name: str, inputs: Callable[[], Tensor], calls: fake_calls.FakeCalls
) -> None:
    op, arguments = CALLS[name]
    options = {"dtype": torch.bfloat16} if op is aten._to_copy.default else {}
    expected = layout(op(*arguments(inputs()), **options))
    first, second = (calls.result(op, arguments(inputs()), options) for _ in range(2))
    assert layout(first) == layout(second) == expected
    assert first is not second
    assert len(calls._results) == 1


def test_several_results_of_a_like_call_are_each_as_torch_computes_them(
    inputs: Callable[[], Tensor], calls: fake_calls.FakeCalls
) -> None:
    first, second = (calls.result(aten.split.Tensor, (inputs(), 16, -1), {}) for _ in range(2))
    expected = aten.split.Tensor(inputs(), 16, -1)
    assert len(calls._results) == 1
    assert [layout(part) for part in first] == [layout(part) for part in second]
    assert [layout(part) for part in second] == [layout(part) for part in expected]


def test_calls_with_other_sizes_strides_numbers_or_types_are_not_alike(
    inputs: Callable[[], Tensor], calls: fake_calls.FakeCalls
) -> None:
    x = inputs()
    for given in (
        (x, 1), (x, 1.0), (x, True), (x, 2), (x.double(), 1), (x[..., :32], 1), (x[..., 32:], 1),
        (x.transpose(0, 1), 1), (x[:, 0], 1),
    ):  # fmt: skip
        before = len(calls._results)
        calls.result(aten.mul.Tensor, given, {})
        assert len(calls._results) == before + 1


def test_a_result_shares_memory_with_its_own_operand_only(
    inputs: Callable[[], Tensor], calls: fake_calls.FakeCalls
) -> None:
    operands = [calls.result(aten.neg.default, (inputs(),), {}) for _ in range(3)]
    views = [calls.result(aten.transpose.int, (operand, 0, 1), {}) for operand in operands]
    parts = [calls.result(aten.slice.Tensor, (view, -1, 0, 8), {}) for view in views]
    for one, operand in enumerate(operands):
        for other, (view, part) in enumerate(zip(views, parts, strict=True)):
            assert calls.share_memory(operand, view) == (one == other)
            assert calls.share_memory(part, operand) == (one == other)
    assert not calls.share_memory(*operands[:2])


def test_a_program_uses_the_results_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_calls, "_UNUSED", {})
    computed = []
    for _ in range(2):
        with fake_calls.fake_tensors() as fakes, torch.no_grad(), fakes.mode:
            given = torch.zeros((*fakes.sizes, 64))
            fake_calls.FakeCalls(fakes).result(aten.neg.default, (given,), {})
            computed.append(len(fakes.results))
    assert computed == [1, 1]


ASKED: dict[str, Callable[[Any], Any]] = {
    "whether a text is short": lambda sizes: bool(sizes[1] < 100),
    "how long a text is": lambda sizes: int(sizes[1]),
    "whether there are as many sequences as tokens": lambda sizes: bool(sizes[0] == sizes[1]),
    "whether tokens are pairs": lambda sizes: bool(sizes[1] % 2 == 0),
    "an order without a guard": lambda sizes: torch._check(sizes[1] < 100),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_program_that_asked_for_sizes_leaves_no_results_to_the_next(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_calls, "_UNUSED", {})
    with fake_calls.fake_tensors() as first, first.mode:
        ASKED[name](first.sizes)
    with fake_calls.fake_tensors() as second:
        assert second is not first
        assert second.hold_for_all_sizes()


def test_programs_of_two_threads_and_of_two_default_dtypes_share_nothing() -> None:
    before = torch.get_default_dtype()
    with fake_calls.fake_tensors() as first, fake_calls.fake_tensors() as second:
        assert first is not second
    try:
        torch.set_default_dtype(torch.bfloat16)
        with fake_calls.fake_tensors() as other:
            assert other is not first
            assert other is not second
    finally:
        torch.set_default_dtype(before)


def test_no_result_is_kept_of_an_operator_of_another_package_or_of_a_tensor_with_values(
    inputs: Callable[[], Tensor], calls: fake_calls.FakeCalls
) -> None:
    calls.result(aten.add.Tensor, (inputs(), torch.tensor(1.0)), {})
    assert not calls._results
    with torch.library._scoped_library("other_package", "DEF") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")
        calls.result(torch.ops.other_package.doubled.default, (inputs(),), {})
    assert not calls._results


@pytest.mark.slow
def test_more_layers_of_a_kind_make_torch_compute_no_more_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Tensor] = []
    original = fake_calls._source

    def watched(tensor: Tensor, operands: list[Tensor]) -> int | None:
        computed.append(tensor)
        return original(tensor, operands)

    monkeypatch.setattr(fake_calls, "_source", watched)
    counts = []
    for layers in (2, 5):
        computed.clear()
        monkeypatch.setattr(fake_calls, "_UNUSED", {})
        assert step_kind(acclimate.init_inference(tiny_model("llama", num_hidden_layers=layers))) == "native"
        counts.append(len(computed))
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_changes_in_place_in_several_layers_are_computed() -> None:
    own = tiny_model("llama", num_hidden_layers=3)
    for layer in own.model.layers:
        kind: Any = type(layer.mlp)
        forward = kind.forward
        methods = {"forward": lambda self, x, forward=forward: forward(self, x).mul_(0.5)}
        layer.mlp.__class__ = type("Halved", (kind,), methods)
    ours = acclimate.init_inference(copy.deepcopy(own))
    assert step_kind(ours) == "native"
    prompt = torch.arange(3, 12)[None]
    texts = [model.generate(prompt, do_sample=False, max_new_tokens=20) for model in (own, ours)]
    assert torch.equal(*texts)
