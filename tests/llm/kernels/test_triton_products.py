"""Products with several dense weights in Triton, computed by its interpreter: the results of plain torch."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
pytest.importorskip("triton", reason="Triton is not installed; torch brings it only with builds for GPUs")

triton_products: Any = pytest.importorskip("acclimate.llm.kernels.triton_products")

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3}  # the interpreter does not round to bfloat16


def linear(k: int, n: int, has_bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """A linear module with random weights."""
    torch.manual_seed(n)
    made = nn.Linear(k, n, bias=has_bias, dtype=dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize(
    "outputs",
    [
        [(40, False), (8, True), (3, False)],
        [(5, True), (1, True)],
        [(33, False)] * 4,
        [(32, False), (64, False)],
    ],
)
@pytest.mark.parametrize("k", [1, 70, 1030])
def test_products_side_by_side_are_those_of_the_modules(
    k: int, outputs: list[tuple[int, bool]], rows: int, dtype: torch.dtype
) -> None:
    modules = [linear(k, n, has_bias, dtype) for n, has_bias in outputs]
    x = torch.randn(rows, k + 3, generator=torch.Generator().manual_seed(rows)).to(dtype)[:, 3:]
    assert triton_products.can_multiply(x, modules)
    with torch.no_grad():
        for found, module in zip(triton_products.products(x, modules), modules, strict=True):
            expected = module(x)
            assert found.dtype == dtype
            largest = float(expected.abs().max())
            torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCES[dtype] * largest)


def test_nan_and_infinity_reach_their_own_row_only() -> None:
    x = torch.ones(3, 20)
    x[0, 7], x[2, 19] = float("nan"), float("inf")
    modules = [linear(20, 4), linear(20, 9)]
    with torch.no_grad():
        found = torch.cat(triton_products.products(x, modules), -1)
        expected = torch.cat([module(x) for module in modules], -1)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found[1].isfinite().all()


class OwnLinear(nn.Linear):
    """A module that computes something else."""


def test_one_row_and_several_weights_are_taken_and_the_rest_is_left_to_torch() -> None:
    x, some = torch.zeros(2, 20), [linear(20, n) for n in (4, 9, 2)]
    assert triton_products.can_multiply(x, some)
    assert triton_products.can_multiply(x[:1], some[:1])
    assert not triton_products.can_multiply(x, some[:1])
    assert not triton_products.can_multiply(torch.zeros(17, 20), some)
    assert not triton_products.can_multiply(x[:0], some)
    assert not triton_products.can_multiply(x, [])
    assert not triton_products.can_multiply(x, [*some, *some])
    assert not triton_products.can_multiply(torch.zeros(20, 2).T, some)


def changed(change: str) -> nn.Module:
    """A linear module that the kernel must not stand for."""
    made: Any = linear(20, 5, has_bias=True)
    if change == "a class of its own":
        made = OwnLinear(20, 5)
    elif change == "a forward of its own":
        made.forward = lambda x: x
    elif change == "a hook":
        made.register_forward_hook(lambda module, given, found: found * 2)
    elif change == "a hook before":
        made.register_forward_pre_hook(lambda module, given: given)
    elif change == "another dtype":
        made.half()
    elif change == "a bias in another dtype":
        made.bias = nn.Parameter(made.bias.detach().half())
    elif change == "a turned weight":
        made.weight = nn.Parameter(torch.zeros(20, 5).T)
    elif change == "a bias with gaps":
        made.bias = nn.Parameter(torch.zeros(10)[::2])
    elif change == "another width":
        made = linear(21, 5)
    elif change == "another device":
        made.to("meta")
    return made


@pytest.mark.parametrize(
    "change",
    [
        "a class of its own", "a forward of its own", "a hook", "a hook before", "another dtype",
        "a turned weight", "a bias in another dtype", "a bias with gaps", "another width", "another device",
    ],
)  # fmt: skip
def test_a_module_that_is_not_plain_is_left_to_torch(change: str) -> None:
    assert triton_products.can_multiply(torch.zeros(2, 20), [linear(20, 4), changed("none")])
    assert not triton_products.can_multiply(torch.zeros(2, 20), [linear(20, 4), changed(change)])


def test_a_model_writes_the_same_text_with_these_products(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1] / "split"))
    from architectures import tiny_model

    import acclimate
    from acclimate.backends.cpu import CPUAccelerator
    from acclimate.llm.decode import graph_step, loop
    from acclimate.llm.decode.lean import LeanDecoder
    from acclimate.llm.loading import packed_modules

    monkeypatch.setattr(packed_modules, "use_few_row_kernels", lambda model: None)  # as on a GPU
    model: Any = tiny_model("qwen2")
    fast: Any = acclimate.init_inference(copy.deepcopy(model))
    lean = loop.lean_decoder(fast)
    assert lean is not None
    loop._found[fast] = LeanDecoder(lean.decoder, None, is_graph=True), loop._found[fast][1]
    taken: list[int] = []

    def watched(x: torch.Tensor, modules: list[nn.Module]) -> list[torch.Tensor]:
        taken.append(len(modules))
        found: list[torch.Tensor] = triton_products.products(x, modules)
        return found

    class Kernels:
        can_multiply, products = staticmethod(triton_products.can_multiply), staticmethod(watched)

    monkeypatch.setattr(
        graph_step, "_kernels", lambda name, *given: Kernels if name.endswith("products") else None
    )
    # The host's graphs repeat torch's operators only: capture each step anew, and replay nothing.
    always_new = property(lambda step: None, lambda step, new: None)
    monkeypatch.setattr(graph_step.GraphStep, "_revision", always_new, raising=False)
    monkeypatch.setattr(CPUAccelerator, "replay_graph", lambda accelerator, graph: None)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    prompt = torch.arange(3, 12)[None]
    assert torch.equal(fast.generate(prompt, **options), model.generate(prompt, **options))
    assert loop.step_kind(fast) == "graph"
    assert {1, 2, 3} == set(taken)  # the output and down, gate and up, and queries, keys and values


def test_it_is_compared_with_torch_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_products.is_right.cache_clear()
    assert triton_products.is_right("cpu", torch.float32)
    triton_products.is_right.cache_clear()
    right = triton_products.products
    monkeypatch.setattr(triton_products, "products", lambda *given: [found * 1.1 for found in right(*given)])
    assert not triton_products.is_right("cpu", torch.float32)
    triton_products.is_right.cache_clear()
