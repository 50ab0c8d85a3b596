"""Products in Triton, computed by its interpreter on the host: the results of plain torch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
pytest.importorskip("triton", reason="Triton is not installed; torch brings it only with builds for GPUs")

from acclimate.llm.kernels import operators
from acclimate.llm.kernels.formats import WEIGHT_FORMATS, WeightFormat
from acclimate.llm.kernels.layout import Parts, pack

operators.define()
triton_linear: Any = pytest.importorskip("acclimate.llm.kernels.triton_linear")


def random_weight(kind: WeightFormat, n: int, k: int, seed: int = 0) -> torch.Tensor:
    """Bytes of a weight with random codes and fields."""
    random = torch.Generator().manual_seed(seed)
    k = kind.padded(k)
    codes = torch.randint(0, 1 << kind.bits, (n, k), dtype=torch.uint8, generator=random)
    fields = {
        field.name: torch.randint(1, 120, (n, field.parts(k)), generator=random).to(field.dtype)
        for field in kind.fields
    }
    return pack(Parts(codes, fields), kind)


def assert_near(found: torch.Tensor, expected: torch.Tensor, largest: float = 1e-5) -> None:
    """Asserts that no element is further away than this part of the largest one."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert float((found - expected).abs().max()) <= largest * float(expected.abs().max())


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("shape", [(1, 32), (37, 1000), (16, 513)])
def test_products_with_every_format_and_size_are_those_of_plain_torch(
    name: str, shape: tuple[int, int]
) -> None:
    kind, (n, k) = WEIGHT_FORMATS[name], shape
    data, x = random_weight(kind, n, k), torch.randn(3, k, generator=torch.Generator().manual_seed(1))
    bias = torch.arange(n).float() * 1000
    assert triton_linear._is_right(kind.number, "cpu")
    for given in (None, bias):
        found = triton_linear.linear(x, data, given, kind.number, n, k)
        assert_near(found, operators.linear(x, data, given, kind.number, n, k))


@pytest.mark.parametrize("rows", [1, 4, 9, 16])
@pytest.mark.parametrize(("name", "n", "k"), [("int8", 20, 96), ("q5_k", 8208, 32), ("uint4", 16, 8320)])
def test_any_number_of_rows_is_multiplied(name: str, n: int, k: int, rows: int) -> None:
    kind = WEIGHT_FORMATS[name]
    data, x = random_weight(kind, n, k), torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))
    found = triton_linear.linear(x, data, None, kind.number, n, k)
    assert_near(found, operators.linear(x, data, None, kind.number, n, k))


@pytest.mark.parametrize("name", ["int8", "mxfp4"])
def test_rows_are_multiplied_by_the_weights_of_their_experts(name: str) -> None:
    kind, n, k = WEIGHT_FORMATS[name], 40, 96
    data = torch.stack([random_weight(kind, n, k, seed) for seed in range(5)])
    x, chosen = torch.randn(4, k), torch.tensor([3, 0, 3, 4])
    found = triton_linear.experts(x, data, chosen, kind.number, n, k)
    by_row = [
        operators.linear(row, data[e], None, kind.number, n, k) for row, e in zip(x, chosen, strict=True)
    ]
    assert_near(found, torch.stack(by_row))


def test_inputs_in_bfloat16_with_strides_give_bfloat16() -> None:
    kind = WEIGHT_FORMATS["q4_k"]
    data, x = random_weight(kind, 24, 256), torch.randn(256, 2, 1).bfloat16().T
    found = triton_linear.linear(x, data, None, kind.number, 24, 256)
    assert found.dtype == torch.bfloat16
    assert_near(found, operators.linear(x, data, None, kind.number, 24, 256), 1e-2)


def test_a_format_whose_kernel_is_wrong_is_multiplied_in_plain_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kind = WEIGHT_FORMATS["int8"]
    data, x = random_weight(kind, 16, 64), torch.randn(1, 64)
    triton_linear._is_right.cache_clear()
    begins = triton_linear._begins(kind.number, 64)
    monkeypatch.setattr(triton_linear, "_begins", lambda number, k: (begins[0] + 512, *begins[1:]))
    found = triton_linear.linear(x, data, None, kind.number, 16, 64)
    triton_linear._is_right.cache_clear()
    assert torch.equal(found, operators.linear(x, data, None, kind.number, 16, 64))
    assert "products with int8 weights on cpu: torch computes this, since Triton's numbers" in caplog.text
