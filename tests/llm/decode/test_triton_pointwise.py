"""Norms, rotations and activations in Triton, computed by its interpreter on the host: the results of plain
torch."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
pytest.importorskip("triton", reason="Triton is not installed; torch brings it only with builds for GPUs")

from acclimate.llm.decode.description import ACTIVATIONS, Norm, Rotary

pointwise: Any = pytest.importorskip("acclimate.llm.decode.triton_pointwise")

RANDOM = torch.Generator().manual_seed(0)
WEIGHT, BIAS = torch.randn(2, 300, generator=RANDOM)
NORMS = {
    f"{kind}{', one more' * one}{', rounded first' * rounds}{', a bias' * (bias is not None)}": Norm(
        kind, WEIGHT, bias, 1e-5, one, rounds
    )
    for kind in ("rms", "layer")
    for one in (False, True)
    for rounds in (False, True)
    for bias in (None, BIAS)
} | {"rms of nothing": Norm("rms", None, None, 1e-3, False, False)}
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3}  # the interpreter does not round to bfloat16


def of_size(norm: Norm, size: int, dtype: torch.dtype) -> Norm:
    """The norm with its first elements in a dtype."""
    weight, bias = (None if t is None else t[:size].to(dtype) for t in (norm.weight, norm.bias))
    return replace(norm, weight=weight, bias=bias)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts that numbers differ by no more than their dtype's rounding."""
    assert found.dtype == expected.dtype
    tolerance = TOLERANCES[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", NORMS)
def test_a_sum_and_its_norm_are_those_of_plain_torch(name: str, dtype: torch.dtype) -> None:
    norm = of_size(NORMS[name], 300, dtype)
    x, added = torch.randn(2, 3, 310, generator=RANDOM).to(dtype)[..., :300]
    assert pointwise.can_normalize(norm, x)
    total, found = pointwise.normalized(norm, x, added)
    assert torch.equal(total, x + added)
    assert_near(found, norm(x + added))
    same, found = pointwise.normalized(norm, x)
    assert same is x
    assert_near(found, norm(x))


@pytest.mark.parametrize("given", [None, torch.randn(3, 70)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_those_of_plain_torch(activation: str, given: torch.Tensor | None) -> None:
    x = torch.randn(3, 80, generator=RANDOM)[:, 10:] * 4
    x[0, :3] = torch.tensor([float("nan"), 60.0, -60.0])
    expected = ACTIVATIONS[activation](x) if given is None else ACTIVATIONS[activation](x) * given
    torch.testing.assert_close(pointwise.gated(activation, x, given), expected, equal_nan=True)


def attention_of(size: int, value_size: int, **changes: Any) -> Any:
    """Attention with four heads of queries and two of keys."""
    plain = {
        "latent": None, "shares": None, "norm_is_per_head": True, "query_norm": None, "key_norm": None,
        "value_norm": None, "rotary": None, "rotary_first": False, "heads": 4, "key_heads": 2,
        "head_size": size, "value_size": value_size,
    }  # fmt: skip
    return SimpleNamespace(**plain | changes)


ROTARIES = {
    "no rotation": None,
    "halves": Rotary(0, 24, False, False),
    "halves, rounded": Rotary(0, 24, False, True),
    "a part": Rotary(0, 12, False, False),
    "pairs": Rotary(0, 24, True, False),
    "pairs of a part": Rotary(0, 8, True, True),
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rotates_first", [False, True])
@pytest.mark.parametrize("norm", [None, "rms, one more", "layer, rounded first, a bias"])
@pytest.mark.parametrize("name", ROTARIES)
def test_heads_are_prepared_and_stored_as_in_plain_torch(
    name: str, norm: str | None, rotates_first: bool, dtype: torch.dtype
) -> None:
    rotary, size, value_size = ROTARIES[name], 24, 40
    query_norm, key_norm = (None if norm is None else of_size(NORMS[norm], size, dtype) for _ in range(2))
    if key_norm is not None:
        key_norm = replace(key_norm, weight=key_norm.weight * 2)
    of_value = Norm("rms", None, None, 1e-2, False, False)
    attention = attention_of(
        size, value_size, query_norm=query_norm, key_norm=key_norm, value_norm=of_value, rotary=rotary,
        rotary_first=rotates_first,
    )  # fmt: skip
    given = torch.randn(3, 4 * size + 2 * size + 2 * value_size, generator=RANDOM).to(dtype)
    query, key, value = given.split([4 * size, 2 * size, 2 * value_size], -1)
    rotation = None
    if rotary is not None:
        rotation = rotary.factors(*torch.randn(2, 3, rotary.width // 2, generator=RANDOM).to(dtype))
    factors = torch.tensor([[1.0], [0.5], [3.0]])

    def prepared(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        found = x.unflatten(-1, (-1, size))
        steps: list[Any] = [lambda y: y if norm is None else norm(y)]
        steps.insert(not rotates_first, lambda y: y if rotary is None else rotary(y, *rotation))
        for step in steps:
            found = step(found)
        return found

    keys, values = (torch.zeros(3, 2, 5, width, dtype=dtype) for width in (size, value_size))
    assert pointwise.can_prepare(attention, query, rotation)
    found = pointwise.prepared_heads(
        attention, query, (key, value), rotation, factors, (keys, values), torch.tensor(3)
    )
    assert_near(found, prepared(query, query_norm) * factors[:, None].to(dtype))
    assert_near(keys[:, :, 3], prepared(key, key_norm))
    assert_near(values[:, :, 3], of_value(value.unflatten(-1, (-1, value_size))))
    for tensor in (keys, values):
        tensor[:, :, 3] = 0
        assert not tensor.any()


def test_a_layer_that_shares_keys_prepares_its_queries_only() -> None:
    query = torch.randn(2, 64, generator=RANDOM)
    attention = attention_of(16, 16, shares=0)
    found = pointwise.prepared_heads(attention, query, None, None, None, None, torch.tensor(0))
    assert torch.equal(found, query.view(2, 4, 16))


@pytest.mark.parametrize(
    "changes",
    [
        {"latent": object()},
        {"query_norm": NORMS["rms"]},
        {"query_norm": NORMS["rms"], "key_norm": NORMS["layer"]},
        {"query_norm": NORMS["rms"], "key_norm": replace(NORMS["rms"], eps=0.1)},
        {"query_norm": NORMS["rms"], "key_norm": NORMS["rms"], "norm_is_per_head": False},
        {"value_norm": NORMS["rms"]},
        {"head_size": 2048},
        {"value_size": 2048},
    ],
)
def test_what_the_kernel_does_not_compute_is_left_to_torch(changes: dict[str, Any]) -> None:
    attention = attention_of(300, 300)
    assert pointwise.can_prepare(attention, torch.zeros(1, 1200), None)
    vars(attention).update(changes)
    assert not pointwise.can_prepare(attention, torch.zeros(1, 1200), None)


def test_norms_whose_weight_has_another_dtype_or_gaps_are_left_to_torch() -> None:
    x = torch.zeros(2, 300, dtype=torch.float16)
    assert pointwise.can_normalize(NORMS["rms"], x)
    assert not pointwise.can_normalize(NORMS["rms, rounded first"], x)
    assert not pointwise.can_normalize(replace(NORMS["rms"], weight=torch.ones(600)[::2]), x)
    assert not pointwise.can_normalize(NORMS["rms"], torch.zeros(300, 2).T)


def test_products_with_gaps_or_two_dtypes_and_float64_are_left_to_torch() -> None:
    gate = torch.zeros(2, 300, dtype=torch.float16)
    assert pointwise.can_gate(gate, None)
    assert pointwise.can_gate(gate, gate[:, :])
    assert not pointwise.can_gate(gate, gate.float())
    assert not pointwise.can_gate(gate, torch.zeros(300, 2, dtype=torch.float16).T)
    assert not pointwise.can_gate(gate.double(), None)
    assert not pointwise.can_normalize(NORMS["rms"], gate.double())
    assert not pointwise.can_prepare(attention_of(300, 300), gate.double(), None)


def test_it_is_compared_with_torch_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pointwise.is_right.cache_clear()
    assert pointwise.is_right("cpu", torch.float32)
    assert pointwise.is_right("cpu", torch.float16)
    pointwise.is_right.cache_clear()
    right = pointwise.gated
    monkeypatch.setattr(pointwise, "gated", lambda *given: right(*given) * 1.1)
    assert not pointwise.is_right("cpu", torch.float32)
    pointwise.is_right.cache_clear()
