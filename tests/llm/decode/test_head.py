"""The output head: greedy decoding finds the token without returning logits."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import tiny_model
from changed_weights import changed

import acclimate
from acclimate.errors import LogitsError
from acclimate.llm.decode.loop import lean_decoder
from acclimate.llm.decode.native import NativeStep
from acclimate.llm.decode.share import likeliest_token

WORDS = 5000
STEPS = 22


def head_over_one_layer(words: int, hidden: int) -> Any:
    options = {"tie_word_embeddings": False, "num_hidden_layers": 1}
    return tiny_model("llama", vocab_size=words, hidden_size=hidden, **options)


@functools.cache
def model_of(dtype: torch.dtype = torch.bfloat16, words: int = WORDS) -> Any:
    """A model whose head has its values again after each test."""
    torch.manual_seed(0)
    model = head_over_one_layer(words, 32)
    # As a trained model's: some words are much likelier than most.
    head = model.lm_head.weight.data
    head.normal_().mul_(0.02)
    head[:: words // 50].mul_(3)
    return acclimate.init_inference(model.to(dtype))


def step_of(model: Any, sequences: int = 1) -> NativeStep:
    lean = lean_decoder(model)
    assert lean is not None
    assert lean.native is not None
    return NativeStep(
        lean.native, lean._cache(torch.zeros(sequences), 64, 0, None, None), torch.zeros(sequences)
    )


def first_largest(logits: torch.Tensor) -> torch.Tensor:
    """The first of the largest numbers of each sequence, which is what all of the head gives."""
    return (logits == logits.max(-1, keepdim=True).values).int().argmax(-1)


def check(model: Any, sequences: int = 1, steps: int = STEPS) -> None:
    """Compares the tokens of steps with and without logits."""
    whole, greedy = step_of(model, sequences), step_of(model, sequences)
    tokens = torch.arange(sequences) + 3
    for _ in range(steps):
        expected = first_largest(whole(tokens))
        assert torch.equal(greedy.likeliest(tokens), expected)
        tokens = (tokens * 7 + expected) % 100


@pytest.mark.parametrize(
    ("dtype", "sequences"),
    [pytest.param("bfloat16", 1, marks=pytest.mark.slow), ("bfloat16", 3), ("float32", 2)],
)
def test_the_token_is_the_one_of_the_whole_head(dtype: str, sequences: int) -> None:
    check(model_of(getattr(torch, dtype)), sequences)


def test_of_equal_logits_the_first_token_wins() -> None:
    model = model_of()
    head = model.lm_head.weight.data
    with changed(head):
        # Every row is there several times, and some differ from the row before in the last place only.
        head.copy_(head[torch.arange(WORDS) // 5 * 977 % WORDS])
        head[1::7] = torch.nextafter(head[1::7], torch.tensor(torch.inf, dtype=head.dtype))
        check(model)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("row", [5, WORDS - 1])
def test_infinite_and_nan_logits_are_refused(row: int, value: float) -> None:
    model = model_of()
    lean_decoder(model)
    head = model.lm_head.weight.data
    with changed(head):
        # Of two opposite rows one has a logit of infinity, and both are NaN if the weight is.
        head[[row, row - 1], row % 32] = torch.tensor([value, -value], dtype=torch.bfloat16)
        with pytest.raises(LogitsError, match="nan" if value != value else "inf"):
            step_of(model).likeliest(torch.tensor([3]))


@pytest.mark.slow
def test_the_last_row_of_an_odd_number_can_win() -> None:
    model = model_of(words=WORDS + 5)
    head = model.lm_head.weight.data
    with changed(head):
        head[-1] *= 10  # the largest, but not so large that rounding decides whether the step is proved
        check(model, sequences=2)


def test_weights_that_change_in_place_between_two_texts_count() -> None:
    model = model_of()
    head = model.lm_head.weight.data
    check(model)
    with changed(head):
        head.neg_()
        check(model, steps=4)
        head[1234] *= 30
        check(model, steps=4)


def test_a_factor_of_the_logits_keeps_the_token() -> None:
    torch.manual_seed(0)
    model = tiny_model("cohere", vocab_size=WORDS, hidden_size=32, logit_scale=0.0625)
    check(acclimate.init_inference(model.to(torch.bfloat16)))


@pytest.mark.parametrize("scale", [pytest.param(0.3, marks=pytest.mark.slow), 0.0031])
def test_a_factor_that_rounds_is_not_taken_for_a_cap(scale: float) -> None:
    torch.manual_seed(0)
    model = tiny_model("cohere", vocab_size=WORDS, hidden_size=32, logit_scale=scale)
    lean = lean_decoder(acclimate.init_inference(model.to(torch.bfloat16)))
    assert lean is not None
    assert lean.decoder.logit_softcap is None
    assert lean.decoder.logit_multiplier == pytest.approx(scale, rel=1e-2)


def test_changes_of_the_head_count_from_the_next_prompt_on() -> None:
    model = model_of()
    prompt = torch.arange(40)[None] + 3

    def first_token_and_next() -> list[int]:
        step = step_of(model)
        token = step.read(prompt, likeliest=True)
        return [int(token), int(step.likeliest(torch.tensor([3])))]

    before = first_token_and_next()
    assert first_token_and_next() == before
    head = model.lm_head.weight.data
    with changed(head):
        head.copy_(head.roll(1, 0))
        assert first_token_and_next() == [token + 1 for token in before]


@pytest.mark.parametrize("factor", [1, *(pytest.param(scale, marks=pytest.mark.slow) for scale in (4, 100))])
def test_a_cap_of_the_logits_keeps_the_token_even_where_many_reach_it(factor: int) -> None:
    torch.manual_seed(0)
    model = tiny_model("gemma2", vocab_size=WORDS, hidden_size=32, final_logit_softcapping=5.0)
    head = model.get_output_embeddings().weight.data
    head[:: WORDS // 50].mul_(3)
    model = acclimate.init_inference(model.to(torch.bfloat16))
    lean = lean_decoder(model)
    assert lean is not None
    assert lean.decoder.logit_softcap == 5.0
    model.get_output_embeddings().weight.data.mul_(factor)
    check(model, steps=6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cap_is_found_where_the_logits_are_small_beside_it(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = tiny_model("gemma2", vocab_size=WORDS, hidden_size=32, final_logit_softcapping=30.0)
    lean = lean_decoder(acclimate.init_inference(model.to(dtype)))
    assert lean is not None
    assert lean.decoder.logit_softcap == 30.0


def test_ranks_that_share_the_vocabulary_agree_on_the_first_of_equal_tokens() -> None:
    found = torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[2.0, 2.0, 1.0], [7.0, 8.0, 9.0]]]).double()

    class SecondRank:
        rank = 1

        def all_gather(self, own: torch.Tensor) -> torch.Tensor:
            assert torch.equal(own, found[1])
            return found

    largest, tokens = torch.tensor([2.0, 2.0, 1.0]), torch.tensor([1, 2, 3])
    ranks: Any = SecondRank()
    best, logits = likeliest_token(ranks, (6, 4), largest, tokens)
    assert best.tolist() == [7, 5, 6]
    assert logits.tolist() == [2.0, 2.0, 3.0]
