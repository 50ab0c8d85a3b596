"""Attention in Triton, computed by its interpreter on the host: the results of plain torch."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
pytest.importorskip("triton", reason="Triton is not installed; torch brings it only with builds for GPUs")

from acclimate.llm.decode.plain import mixed_values

triton_attention: Any = pytest.importorskip("acclimate.llm.kernels.triton_attention")

SINKS = torch.linspace(-1, 2, 6)


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"window": 64}, {"softcap": 20.0}, {"sinks": SINKS}])
@pytest.mark.parametrize(("room", "place"), [(7, 0), (7, 6), (100, 90), (400, 300)])
def test_what_heads_see_is_mixed_as_in_plain_torch(room: int, place: int, options: dict[str, Any]) -> None:
    random = torch.Generator().manual_seed(place)
    query = torch.randn(3, 6, 20, generator=random)
    keys, values = (torch.randn(3, 2, room, size, generator=random) for size in (20, 40))
    for later in (keys, values):
        later[:, :, place + 1 :] = float("nan")  # is not read
    starts, places = torch.tensor([0, min(3, place), -2]), torch.arange(room)
    seen = (places <= place) & (places >= starts[:, None]) & (places > place - options.get("window", room))
    attention: Any = SimpleNamespace(
        key_heads=2, head_size=20, scale=0.2, softcap=options.get("softcap"), sinks=options.get("sinks")
    )
    expected = mixed_values(attention, query, keys.nan_to_num(), values.nan_to_num(), seen)
    found = triton_attention.mixed_values(
        query, keys, values, torch.tensor(place), starts, scale=0.2, **options
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "size", "value_size", "dtype", "is_taken"),
    [
        (128, 256, 256, torch.bfloat16, True),
        (71, 64, 64, torch.float32, True),
        (128, 256, 256, torch.float32, False),
        (256, 256, 256, torch.float16, False),
        (4, 64, 300, torch.bfloat16, False),
        (4, 64, 64, torch.float64, False),
    ],
)
def test_heads_that_need_more_memory_than_a_gpu_has_and_other_dtypes_are_left_to_torch(
    heads: int, size: int, value_size: int, dtype: torch.dtype, is_taken: bool
) -> None:
    query = torch.zeros(1, heads, size, dtype=dtype)
    keys, values = (torch.zeros(1, 1, 8, width, dtype=dtype) for width in (size, value_size))
    assert triton_attention.can_mix(query, keys, values) == is_taken
    by_column = values.transpose(2, 3).contiguous().transpose(2, 3)
    assert not triton_attention.can_mix(query, keys, by_column)
    assert not triton_attention.can_mix(query, keys.to(torch.int8), values)


def test_it_is_compared_with_torch_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_attention.is_right.cache_clear()
    assert triton_attention.is_right("cpu", torch.float32)
    assert triton_attention.is_right("cpu", torch.float16)
    triton_attention.is_right.cache_clear()
    right = triton_attention.mixed_values
    monkeypatch.setattr(
        triton_attention, "mixed_values", lambda *given, scale: right(*given, scale=2 * scale)
    )
    assert not triton_attention.is_right("cpu", torch.float32)
    triton_attention.is_right.cache_clear()
