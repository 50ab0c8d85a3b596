"""Ranges made while a model is built on the meta device: on the host, with torch's values, if short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, reject
from hypothesis import strategies as st

import acclimate
from acclimate.llm.loading.host_ranges import MOST, HostRanges

numbers = st.integers(-50, 50) | st.floats(-50, 50, allow_nan=False)


@given(
    st.lists(numbers, min_size=1, max_size=3),
    st.sampled_from([None, torch.int64, torch.float64, torch.bfloat16]),
)
def test_short_ranges_are_torchs_own(limits: list[float], dtype: torch.dtype | None) -> None:
    try:
        expected = torch.arange(*limits, dtype=dtype)
    except (RuntimeError, ValueError):
        reject()
    with HostRanges(), torch.device("meta"):
        made = torch.arange(*limits, dtype=dtype)
    if made.device.type == "meta":  # a tiny step
        assert made.shape == expected.shape
    else:
        assert torch.equal(made, expected)
    assert made.dtype == expected.dtype


@pytest.mark.parametrize("limits", [(MOST + 1,), (10**12,), (0, 1.0, 1e-12), (0, float("1e300"), 1e290)])
def test_long_ranges_take_no_memory(limits: tuple[float, ...]) -> None:
    with HostRanges(), torch.device("meta"):
        assert torch.arange(*limits).device.type == "meta"


def test_ranges_elsewhere_stay_where_they_are() -> None:
    with HostRanges():
        assert torch.arange(3).tolist() == [0, 1, 2]
        assert torch.arange(end=3, device="meta").device.type == "cpu"
        assert torch.empty(3, device="meta").device.type == "meta"


def test_a_tensor_like_one_of_the_meta_device_has_its_shape_dtype_and_the_given_device() -> None:
    for like in (
        torch.empty(2, 3, dtype=torch.bfloat16, device="meta"),
        torch.empty(3, 2, device="meta").t(),
    ):
        with HostRanges():
            made = torch.empty_like(like, device="cpu")
        expected = torch.empty_like(like, device="cpu")
        assert (made.device, made.dtype, made.stride()) == (expected.device, like.dtype, expected.stride())
    with HostRanges():
        assert torch.empty_like(torch.ones(2), dtype=torch.int8).dtype == torch.int8
        assert torch.empty_like(torch.empty(2, device="meta")).device.type == "meta"


def test_a_command_loads_a_model_without_torchs_compiler(tiny_folder: Path) -> None:
    code = (
        "import sys; from acclimate.__main__ import main; main(); "
        "print([name for name in ('torch._dynamo', 'sympy') if name in sys.modules])"
    )
    words = ["generate", "a", "--model", str(tiny_folder), "--max-new-tokens", "2", "--dtype", "float32"]
    run = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert run.stdout.endswith("[]\n"), run.stdout + run.stderr


def test_a_model_whose_code_mixes_a_range_with_the_meta_device_is_loaded_all_the_same(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    expected = acclimate.init_inference(str(tiny_folder), dtype="float32")
    made: list[str] = []

    class Mixed(modeling_llama.LlamaRMSNorm):  # type: ignore[misc]
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            made.append((torch.arange(4) * torch.ones(4)).device.type)

    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", Mixed)
    model = acclimate.init_inference(str(tiny_folder), dtype="float32")
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert set(made) == {"meta"}
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(tokens).logits, expected(tokens).logits)
