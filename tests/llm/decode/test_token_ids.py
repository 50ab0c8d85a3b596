"""Tokens and positions that a model has no row for: an IndexError, as in transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import tiny_model

import acclimate
from acclimate.llm.decode.description import Share, SharedTable
from acclimate.llm.decode.lean import LeanDecoder
from acclimate.llm.decode.loop import lean_decoder, step_kind
from acclimate.llm.decode.modules import embedding_rows
from acclimate.llm.kernels import PackedWeight, operators
from quick_parameters import quick

PROMPT = torch.arange(3, 12)[None]
WORDS = 160
BAD = [WORDS, WORDS + 1, -1, -100, 10**7, 2**62, -(2**63)]
FORMS = {
    f"{dtype}-{weight_format}": (dtype, weight_format)
    for dtype, weight_format in (
        ("float32", None), ("bfloat16", None), ("float32", "int8"), ("bfloat16", "int4"),
    )
}  # fmt: skip


@pytest.fixture(scope="module", params=quick(FORMS, "float32-None", "bfloat16-int4"))
def model(request: pytest.FixtureRequest) -> Any:
    dtype, weight_format = request.param
    made = acclimate.init_inference(tiny_model("llama").to(getattr(torch, dtype)), quantize=weight_format)
    assert step_kind(made) == "native"
    return made


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", [(0, 0), (0, -1), (1, 4)])
def test_a_prompt_with_an_unknown_token_is_an_index_error(
    model: Any, bad: int, place: tuple[int, int]
) -> None:
    prompt = PROMPT.repeat(2, 1)
    prompt[place] = bad
    with pytest.raises(IndexError):
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize("bad", BAD)
def test_an_unknown_token_in_a_later_step_is_an_index_error(model: Any, bad: int) -> None:
    lean = lean_decoder(model)
    assert isinstance(lean, LeanDecoder)
    with torch.no_grad():
        begun = model(input_ids=PROMPT, use_cache=True).past_key_values
    step = lean.go_on(begun, torch.zeros(1), PROMPT.shape[1], 64)
    with pytest.raises(IndexError):
        step.likeliest(torch.tensor([bad]))
    with pytest.raises(IndexError):
        step(torch.tensor([bad]))
    assert step(torch.tensor([5])).isfinite().all()


@pytest.mark.parametrize("bad", [WORDS, -1, 10**7])
def test_a_pad_token_that_the_model_lacks_is_an_index_error_once_a_sequence_has_ended(
    model: Any, bad: int
) -> None:
    prompt = torch.cat((PROMPT, PROMPT + 40))
    mask = torch.ones_like(prompt)
    free = model.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False)[:, 9:]
    ends = next(int(token) for token in free[0] if token not in free[1])
    with pytest.raises(IndexError):
        model.generate(
            prompt, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=ends,
            pad_token_id=bad,
        )  # fmt: skip


def test_a_token_of_a_logits_processor_beyond_the_vocabulary_is_an_index_error(model: Any) -> None:
    def widen(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.cat((scores, scores.amax(-1, keepdim=True) + 1), -1)

    with pytest.raises(IndexError):
        model.generate(PROMPT, max_new_tokens=3, do_sample=False, logits_processor=[widen])


def test_a_prompt_of_floats_is_refused_as_by_transformers(model: Any) -> None:
    with pytest.raises(RuntimeError, match=r"scalar type|int64"):
        model.generate(PROMPT.float(), max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize("weight_format", ["int8", "int4", "int5", "q4_k", "q8_0"])
@pytest.mark.parametrize("device", ["native", "plain"])
def test_a_quantised_embedding_has_no_row_beside_its_own(weight_format: str, device: str) -> None:
    if weight_format.startswith("q"):
        bytes_of = {"q4_k": 144, "q8_0": 272}[weight_format]
        blocks = torch.zeros(100 * bytes_of, dtype=torch.uint8)
        packed = PackedWeight.from_gguf(blocks, weight_format, (100, 256))
    else:
        packed = PackedWeight.quantize(torch.randn(100, 256), weight_format)

    def rows(tokens: torch.Tensor) -> torch.Tensor:
        if device == "native":
            return packed.rows(tokens)
        return operators._rows(packed.data, tokens, packed.number, *packed.shape, torch.float32)

    for bad in (100, 101, 111, 112, -1, -16, 2**40):
        with pytest.raises(IndexError):
            rows(torch.tensor([[3, bad]]))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float32])
def test_ids_of_a_dtype_that_torch_refuses_are_not_called_out_of_range(dtype: torch.dtype) -> None:
    packed = PackedWeight.quantize(torch.randn(160, 32), "int8")
    with pytest.raises(RuntimeError):
        packed.rows(torch.ones(1, 4, dtype=dtype))


def test_a_table_that_ranks_share_has_no_row_beyond_that_of_the_last_rank() -> None:
    class OneOfTwo:
        def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
            return values

    ranks: Any = OneOfTwo()
    table = torch.nn.Embedding(4, 8)
    share = Share(ranks, frozenset(), SharedTable(range(4), 7), None, {})
    assert embedding_rows(table, torch.tensor([3, 6]), share)[1].eq(0).all()
    for bad in (7, -1):
        with pytest.raises(IndexError):
            embedding_rows(table, torch.tensor([3, bad]), share)


def test_a_position_beyond_the_learned_ones_is_an_index_error_in_native_code() -> None:
    model = acclimate.init_inference(tiny_model("gpt2"))
    assert step_kind(model) == "native"
    with pytest.raises(IndexError):
        model.generate(torch.full((1, 120), 5), max_new_tokens=20, do_sample=False)


def test_a_resized_vocabulary_gives_the_new_rows_and_no_others() -> None:
    model = acclimate.init_inference(tiny_model("llama"))
    model.generate(PROMPT, max_new_tokens=2, do_sample=False)
    model.resize_token_embeddings(WORDS - 40)
    assert int(model.generate(PROMPT, max_new_tokens=12, do_sample=False).max()) < WORDS - 40
    prompt = PROMPT.clone()
    prompt[0, 2] = WORDS - 30
    with pytest.raises(IndexError):
        model.generate(prompt, max_new_tokens=2, do_sample=False)
