"""Greedy decoding reads only the rows of the head that can be the largest: the token is the same."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import tiny_model

import acclimate
from acclimate.errors import LogitsError
from acclimate.llm.decode.loop import lean_decoder
from acclimate.llm.decode.native import NativeStep
from acclimate.llm.decode.share import likeliest_token

WORDS = (4 << 20) // 32  # the fewest that are worth a coarse copy
STEPS = 22


def head_over_one_layer(words: int, hidden: int, **options: Any) -> Any:
    options = {"tie_word_embeddings": False, "num_hidden_layers": 1, **options}
    return tiny_model("llama", vocab_size=words, hidden_size=hidden, **options)


def model_of(
    dtype: torch.dtype = torch.bfloat16, words: int = WORDS, hidden: int = 32, **options: Any
) -> Any:
    torch.manual_seed(0)
    model = head_over_one_layer(words, hidden, **options)
    # As a trained model's: some words are much likelier than most.
    head = model.lm_head.weight.data
    head.normal_().mul_(0.02)
    head[:: words // 50].mul_(3)
    return acclimate.init_inference(model.to(dtype))


def step_of(model: Any, sequences: int = 1) -> NativeStep:
    lean = lean_decoder(model)
    assert lean is not None
    assert lean.native is not None
    return NativeStep(lean.native, lean._cache(torch.zeros(sequences), 64), torch.zeros(sequences))


def first_largest(logits: torch.Tensor) -> torch.Tensor:
    """The first of the largest numbers of each sequence, which is what all of the head gives."""
    return (logits == logits.max(-1, keepdim=True).values).int().argmax(-1)


def check(model: Any, sequences: int = 1, steps: int = STEPS) -> None:
    """Compares the tokens of steps with and without logits."""
    whole, screened = step_of(model, sequences), step_of(model, sequences)
    tokens = torch.arange(sequences) + 3
    for _ in range(steps):
        expected = first_largest(whole(tokens))
        assert torch.equal(screened.likeliest(tokens), expected)
        tokens = (tokens * 7 + expected) % 100


@pytest.mark.parametrize(("dtype", "sequences"), [("bfloat16", 1), ("bfloat16", 3), ("float32", 2)])
def test_the_token_is_the_one_of_the_whole_head(dtype: str, sequences: int) -> None:
    check(model_of(getattr(torch, dtype)), sequences)


def test_rows_that_a_coarse_copy_puts_in_another_order_are_told_apart() -> None:
    model = model_of()
    head = model.lm_head.weight.data
    # Rows that differ by less than the copy's steps, and one of two opposite directions always wins.
    near = head[7] * (20 + torch.randn(300, 32).to(head.dtype) / 4)
    head[:: WORDS // 150][:150], head[1 :: WORDS // 150][:150] = near[:150], -near[150:]
    check(model, steps=STEPS + 10)


def test_of_equal_logits_the_first_token_wins() -> None:
    model = model_of()
    head = model.lm_head.weight.data
    # Every row is there several times, and some differ from the row before in the last place only.
    head.copy_(head[torch.arange(WORDS) // 5 * 977 % WORDS])
    head[1::7] = torch.nextafter(head[1::7], torch.tensor(torch.inf, dtype=head.dtype))
    check(model)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("row", [5, 40_000, WORDS - 1])
def test_rows_with_infinite_or_nan_weights_are_never_ruled_out(row: int, value: float) -> None:
    model = model_of()
    lean_decoder(model)
    # Of two opposite rows one has a logit of infinity, and both are NaN if the weight is.
    model.lm_head.weight.data[[row, row - 1], row % 32] = torch.tensor([value, -value], dtype=torch.bfloat16)
    with pytest.raises(LogitsError, match="nan" if value != value else "inf"):
        step_of(model).likeliest(torch.tensor([3]))


def test_rows_with_huge_weights_are_never_ruled_out() -> None:
    model = model_of()
    lean_decoder(model)
    model.lm_head.weight.data[[777, WORDS - 1], 3] = 1e37
    check(model)


@pytest.mark.parametrize("factor", [1e-7, 1e7])
def test_a_head_beyond_what_float16_scales_can_hold_gives_the_same_token(factor: float) -> None:
    model = model_of()
    model.lm_head.weight.data.mul_(factor)
    check(model, steps=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_end_within_a_block_give_the_same_token(dtype: torch.dtype) -> None:
    check(model_of(dtype, hidden=48), steps=4)


def test_a_last_group_of_fewer_rows_counts_no_row_that_there_is_not() -> None:
    model = model_of(words=WORDS + 5)
    head = model.lm_head.weight.data
    head[-1] *= 10  # the largest, but not so large that rounding decides whether the step is proved
    check(model, sequences=2)


def test_a_head_with_equally_likely_words_is_read_whole() -> None:
    model = model_of()
    head = model.lm_head.weight.data
    head.copy_(head[:1].expand_as(head).clone())
    check(model)


def test_a_row_that_cannot_be_the_best_is_not_read() -> None:
    model = model_of()
    step, tokens = step_of(model), torch.tensor([3])
    tokens = step.likeliest(tokens)
    # Rows are ruled out by what they were when the text began: this one would win now, or its opposite.
    model.lm_head.weight.data[[1234, 1235]] = torch.stack((torch.ones(32), -torch.ones(32))).bfloat16() * 1e3
    assert int(step.likeliest(tokens)) not in (1234, 1235)
    assert int(step_of(model).likeliest(tokens)) in (1234, 1235)


def test_weights_that_change_in_place_between_two_texts_count() -> None:
    model = model_of()
    check(model)
    model.lm_head.weight.data.neg_()
    check(model, steps=4)
    model.lm_head.weight.data[1234] *= 30
    check(model, steps=4)


def test_a_factor_of_the_logits_keeps_the_token() -> None:
    torch.manual_seed(0)
    model = tiny_model("cohere", vocab_size=WORDS, hidden_size=32, logit_scale=0.0625)
    check(acclimate.init_inference(model.to(torch.bfloat16)))


@pytest.mark.parametrize("scale", [0.3, 0.0031])
def test_a_factor_that_rounds_is_not_taken_for_a_cap(scale: float) -> None:
    torch.manual_seed(0)
    model = tiny_model("cohere", vocab_size=WORDS, hidden_size=32, logit_scale=scale)
    lean = lean_decoder(acclimate.init_inference(model.to(torch.bfloat16)))
    assert lean is not None
    assert lean.decoder.logit_softcap is None
    assert lean.decoder.logit_multiplier == pytest.approx(scale, rel=1e-2)


def quantised_model_of(words: int = WORDS, hidden: int = 32, factor: float = 1) -> Any:
    """A model with a head in int5."""
    torch.manual_seed(0)
    model = head_over_one_layer(words, hidden)
    head = model.lm_head.weight.data
    head.normal_().mul_(0.02 * factor)
    head[:: words // 50].mul_(3)
    model = acclimate.init_inference(model.to(torch.bfloat16), quantize="int4")
    assert model.lm_head.packed.format == "int5"
    return model


@pytest.mark.parametrize(("hidden", "sequences"), [(32, 1), (32, 2), (48, 1), (32, 3)])
def test_a_head_in_int5_gives_the_same_token_as_all_of_it(hidden: int, sequences: int) -> None:
    check(quantised_model_of(WORDS + 5, hidden), sequences)


@pytest.mark.parametrize("factor", [1e-7, 1e7])
def test_a_head_in_int5_of_very_small_or_large_values_gives_the_same_token(factor: float) -> None:
    check(quantised_model_of(factor=factor), steps=4)


def test_a_head_in_int5_with_equally_likely_words_is_read_whole() -> None:
    model = quantised_model_of()
    packed = model.lm_head.packed.data
    packed.copy_(packed[:1].expand_as(packed).clone())
    check(model)


def test_rows_in_int5_that_cannot_be_the_best_are_not_read_until_the_next_text() -> None:
    model = quantised_model_of()
    whole, screened, tokens = step_of(model), step_of(model), torch.tensor([3])
    whole(tokens)
    screened.likeliest(tokens)
    logits = whole(tokens)
    group = int(logits.argmin()) // 16
    packed = model.lm_head.packed.data
    scales = packed[group, :64].clone().view(torch.float32) * 1e4
    packed[group, :64] = scales.view(torch.uint8)
    assert torch.equal(screened.likeliest(tokens), first_largest(logits))
    assert int(step_of(model).likeliest(tokens)) // 16 == group


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
    head.copy_(head.roll(1, 0))
    assert first_token_and_next() == [token + 1 for token in before]


@pytest.mark.parametrize("factor", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (4, 100))])
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


def mapped_head(model: Any, folder: Path) -> torch.Tensor:
    """Puts the head's values into a file, and a private mapping of it in their place."""
    head = model.lm_head.weight
    file = folder / "head"
    file.write_bytes(head.data.view(torch.uint8).numpy().tobytes())
    mapped = torch.from_file(str(file), shared=False, size=head.numel(), dtype=head.dtype)
    head.data = mapped.view(head.shape)
    read: torch.Tensor = head.data
    return read


def resident_share(tensor: torch.Tensor) -> float:
    """How much of a tensor's memory is in this process now."""
    page = os.sysconf("SC_PAGESIZE")
    first, count = tensor.data_ptr() // page, tensor.nbytes // page
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(first * 8)
        entries = struct.unpack(f"{count}Q", file.read(count * 8))
    return sum(entry >> 63 for entry in entries) / count


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep the pages")
def test_a_head_in_a_mapped_file_leaves_memory_once_its_coarse_copy_is_made(tmp_path: Path) -> None:
    model = model_of(words=1 << 17, hidden=128)
    head = mapped_head(model, tmp_path)
    whole, screened = step_of(model), step_of(model)
    token = torch.tensor([3])
    expected = first_largest(whole(token))
    assert resident_share(head) == 1
    assert torch.equal(screened.likeliest(token), expected)
    assert resident_share(head) < 0.5
    check(model)


def test_changes_in_a_private_mapping_are_not_lost_with_the_pages_of_its_file(tmp_path: Path) -> None:
    model = model_of(words=1 << 17, hidden=128)
    head = mapped_head(model, tmp_path)
    lean_decoder(model)
    for row in range(5, 1 << 17, 9_000):
        head[row] = head[7] * 30
    changed = head.clone()
    for _ in range(2):  # the second text compares the head with what it was
        check(model, steps=6)
    assert torch.equal(head, changed)
