"""The inference operators refuse numbers, shapes and dtypes that do not fit, before they read memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import tiny_model

import acclimate
from acclimate.llm.decode.loop import lean_decoder
from acclimate.llm.decode.native import NativeStep, _ProgramWriter
from acclimate.llm.kernels import PackedWeight, builder
from acclimate.llm.kernels.formats import WEIGHT_FORMATS

Q4_K = WEIGHT_FORMATS["q4_k"]
LARGE = [2**40 + 1, 2**60, 2**62, 2**63 - 1, -1, -256, -(2**63)]


@pytest.mark.parametrize("rows", LARGE)
@pytest.mark.parametrize("columns", [256, -256, 2**62, 2**40 + 256])
def test_blocks_of_a_negative_or_overflowing_shape_are_refused(rows: int, columns: int) -> None:
    builder.load("cpu")
    block = torch.zeros(Q4_K.gguf_bytes, dtype=torch.uint8)
    # The product of -1 rows and -256 columns is that of one block.
    with pytest.raises(RuntimeError, match="do not match"):
        torch.ops.acclimate.packed_from_gguf(block, Q4_K.number, rows, columns)


@pytest.mark.parametrize("number", LARGE)
def test_a_weight_of_a_negative_or_overflowing_shape_is_refused(number: int) -> None:
    packed = PackedWeight.quantize(torch.randn(20, 64), "int8")
    ops, x = torch.ops.acclimate, torch.randn(2, 64)
    for rows, columns in ((number, 64), (20, number)):
        with pytest.raises(RuntimeError, match=r"weight|input"):
            ops.packed_linear(x, packed.data, None, packed.number, rows, columns)
        with pytest.raises(RuntimeError, match="weight"):
            ops.packed_values(packed.data, packed.number, rows, columns, torch.float32)
        with pytest.raises(RuntimeError, match="weight"):
            ops.packed_rows(
                packed.data, torch.zeros(1, dtype=torch.long), packed.number, rows, columns, torch.float32
            )


@pytest.fixture(scope="module")
def step() -> Any:
    """The step of a tiny model, with an empty cache of 64 places for two sequences."""
    lean = lean_decoder(acclimate.init_inference(tiny_model("llama")))
    assert lean is not None
    assert lean.native is not None
    starts = torch.zeros(2, dtype=torch.long)
    return NativeStep(lean.native, lean._cache(starts, 64, 0, None, None), starts)


def call(step: NativeStep, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "number": step._native.number, "cache": step._addresses, "tokens": torch.tensor([3, 4]),
        "starts": torch.zeros(2, dtype=torch.long), "place": 0, "logits": torch.empty(2, 160),
        "best": torch.empty(2, dtype=torch.long), "largest": torch.empty(2), "threads": 1,
    }  # fmt: skip
    return torch.ops.acclimate.decode_step(*{**given, **changes}.values())


def test_a_step_with_fitting_arguments_runs(step: NativeStep) -> None:
    assert call(step) is True
    assert call(step, threads=-5) is True


@pytest.mark.parametrize(
    "changes",
    [
        {"number": 10**9},
        {"tokens": torch.tensor([3, 4], dtype=torch.int32)},
        {"tokens": torch.tensor([3.0, 4.0])},
        {"tokens": torch.tensor([3, 4, 5])},
        {"tokens": torch.empty(0, dtype=torch.long)},
        {"tokens": torch.tensor([[3, 0], [4, 0]])[:, 0]},
        {"tokens": torch.tensor([3, 4], device="meta")},
        {"starts": torch.zeros(17, dtype=torch.long)},
        {"starts": torch.empty(0, dtype=torch.long)},
        {"starts": torch.tensor([0, 1])},
        {"starts": torch.tensor([0, -1])},
        {"place": -1},
        {"place": 64},
        {"place": 2**63 - 1},
        {"logits": torch.empty(2, 159)},
        {"logits": torch.empty(2, 160, dtype=torch.float64)},
        {"logits": torch.empty(160, 2).t()},
        {"best": torch.empty(1, dtype=torch.long)},
        {"best": torch.empty(2)},
        {"best": torch.empty(0, dtype=torch.long)},
        {"largest": torch.empty(1)},
        {"cache": torch.empty(0, dtype=torch.long)},
        {"cache": torch.tensor([64, 10**6, 10**6])},
        {"cache": torch.tensor([64, 1, 3, 0, 0])},
    ],
    ids=lambda changes: f"{next(iter(changes))}",
)
def test_a_step_with_other_arguments_is_refused(step: NativeStep, changes: dict[str, Any]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        call(step, **changes)


@pytest.mark.parametrize("token", [160, -1, 10**7, 2**62])
def test_a_step_says_that_a_token_has_no_row(step: NativeStep, token: int) -> None:
    logits = torch.full((2, 160), 7.0)
    assert call(step, tokens=torch.tensor([3, token]), logits=logits) is False
    assert bool((logits == 7).all())


@pytest.mark.parametrize("numbers", [[], [0], [0, 8, 1], [5] * 200, [-1] * 200, [2**62] * 200])
def test_numbers_that_describe_no_decoder_are_refused(numbers: list[int]) -> None:
    builder.load("cpu")
    with pytest.raises(RuntimeError):
        torch.ops.acclimate.decode_start(torch.tensor(numbers, dtype=torch.long))


@pytest.mark.parametrize("number", [len(WEIGHT_FORMATS) + 1, -1, 2**32, 2**63 - 1])
def test_a_decoder_with_a_weight_of_no_format_is_refused(step: NativeStep, number: int) -> None:
    writer = _ProgramWriter(step._native.decoder, 0)
    writer.decoder(step._native.decoder)
    writer.numbers[4] = number  # of the embedding
    with pytest.raises(RuntimeError, match="unknown weight format"):
        torch.ops.acclimate.decode_start(torch.tensor(writer.numbers))
