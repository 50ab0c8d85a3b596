"""Keys and values in int8: what is stored is the formula's, and steps compute with exactly what is stored."""

from __future__ import annotations

import copy
import functools
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_weights import changed
from transformers import DynamicCache

from quick_parameters import quick

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import tiny_model

import acclimate
from acclimate.errors import LogitsError, QuantizationError
from acclimate.llm.decode import cache, native
from acclimate.llm.decode.batching import Batcher
from acclimate.llm.decode.cache import StepCache
from acclimate.llm.decode.lean import LeanDecoder
from acclimate.llm.decode.loop import lean_decoder
from acclimate.llm.decode.native import NativeStep
from acclimate.llm.kernels import builder as kernels
from acclimate.llm.read_tokens import RemembersTexts
from acclimate.ops import simd

WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "windows": ("gemma3_text", WINDOWS),
    "experts and sinks": ("gpt_oss", WINDOWS),
    "latents": ("deepseek_v3", {"kv_lora_rank": 32}),
    "heads of 40": ("llama", {"head_dim": 40}),
    "soft caps": ("gemma2", WINDOWS),
}
EACH = quick(tuple(MODELS), "windows", "latents")
START = torch.zeros(1, dtype=torch.long)


@functools.cache
def lean_of(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, LeanDecoder]:
    """A tiny model, and its description."""
    kind, changes = MODELS[name]
    made = tiny_model(kind, **{"max_position_embeddings": 512, **changes}).to(dtype)
    model = acclimate.init_inference(made, kv_cache_dtype="int8")
    lean = lean_decoder(model)
    assert lean is not None
    assert lean.native is not None
    return model, lean


def begun(lean: LeanDecoder, rows: int = 1, **changes: Any) -> NativeStep:
    """A step without earlier tokens."""
    options: dict[str, Any] = {"values_by_column": True, "dtype": torch.int8, **changes}
    assert lean.native is not None
    held = StepCache(lean.decoder, rows, torch.device("cpu"), options.pop("room", 64), **options)
    return NativeStep(lean.native, held, torch.zeros(rows, dtype=torch.long))


def text(length: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 150, (rows, length), generator=torch.Generator().manual_seed(1))


def in_blocks(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, -values.shape[-1] % 16)).unflatten(-1, (-1, 16))


def in_int8(exact: torch.Tensor) -> torch.Tensor:
    """The formula: for each 16 elements the smallest power of two with which they are -127 to 127."""
    blocks = in_blocks(exact.double())
    largest = blocks.abs().amax(-1, keepdim=True)
    power = torch.exp2(torch.ceil(torch.log2(largest.clamp(min=1e-30) / 127)))
    return ((blocks / power).round() * power).flatten(-2)[..., : exact.shape[-1]]


@pytest.fixture(params=simd.usable_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    kernels.load("cpu")
    native_isa = torch.ops.acclimate.inference_use_isa
    native_isa(simd.isa_number(request.param))
    yield request.param
    native_isa(simd.BEST)


@pytest.mark.parametrize("name", EACH)
def test_stored_keys_and_values_are_the_formulas(name: str) -> None:
    _, lean = lean_of(name)
    ids = text(20)[0]
    exact, rounded = begun(lean, dtype=None), begun(lean)
    for token in ids.split(1):
        exact.likeliest(token)
        rounded.likeliest(token)
    first = max(exact.cache.firsts[0], rounded.cache.firsts[0])
    # Those of the first layer depend on no others.
    pairs = zip(exact.cache.held(0, first, 20), rounded.cache.held(0, first, 20), strict=True)
    for own, found in pairs:
        assert torch.equal(found.double(), in_int8(own))
        assert not torch.equal(found, own)


@pytest.mark.parametrize("name", EACH)
def test_a_step_computes_with_the_stored_numbers_as_plain_torch_does(name: str, isa: str) -> None:
    _, lean = lean_of(name)
    step = begun(lean)
    for token in text(40)[0].split(1):
        step.likeliest(token)
    shown = DynamicCache()
    step.cache.give(shown)
    plain = LeanDecoder(lean.decoder, None).go_on(shown, START, 40, 64, dtype=torch.int8)
    for token in text(4, 5)[0].split(1):
        torch.testing.assert_close(step(token), plain(token), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_is_stored_and_read_as_token_by_token(name: str) -> None:
    _, lean = lean_of(name, torch.bfloat16)
    assert lean.native is not None
    if not lean.native.prefills:
        pytest.skip("this processor has no vectors that the kernels know, or has tiles")
    ids = text(45, 3)
    prompt, single = begun(lean, 3), begun(lean, 3)
    read = prompt.read(ids, likeliest=False)
    for place in range(44):
        single.likeliest(ids[:, place])
    found = single(ids[:, 44])
    assert float((read - found).abs().max() / found.abs().max()) < 0.1
    first = max(prompt.cache.firsts[0], single.cache.firsts[0])
    for one, other in zip(prompt.cache.held(0, first, 45), single.cache.held(0, first, 45), strict=True):
        torch.testing.assert_close(one, other, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_given_to_transformers_and_taken_back_is_the_same(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randn((1, 2, 200, 40), generator=random) * torch.exp2(
        torch.randint(-20, 9, (1, 2, 200, 1), generator=random)
    )
    values[:, :, 3] = 0
    values[:, :, 4, 7] = 60000
    codes, exponents = cache._as_int8(values.to(dtype))
    shown = cache._from_int8(codes, exponents, dtype)
    again = cache._as_int8(shown)
    assert torch.equal(codes, again[0])
    assert torch.equal(exponents, again[1])
    scale = in_blocks(values).abs().amax(-1)
    error = in_blocks(shown.float() - values.to(dtype).float())
    assert bool((error.abs().amax(-1) <= scale / 127).all())


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_stored_as_nan(value: float) -> None:
    given = torch.ones(1, 1, 1, 64)
    given[..., 40] = value
    shown = cache._from_int8(*cache._as_int8(given), torch.float32)
    assert torch.equal(shown.isnan()[0, 0, 0].nonzero().flatten(), torch.arange(32, 48))
    assert set(shown[~shown.isnan()].tolist()) == {1.0}


@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
def test_keys_and_values_that_overflow_are_an_error(projection: str) -> None:
    model, _ = lean_of("plain", torch.bfloat16)
    weight = getattr(model.model.layers[0].self_attn, projection).weight
    with changed(weight):
        weight.data[3].fill_(torch.inf)
        with pytest.raises(LogitsError):
            model.generate(text(9), max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("name", EACH)
def test_a_cache_that_grows_and_moves_gives_the_bits_of_one_with_room(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_LEAST_SPARE", 1)
    _, lean = lean_of(name)
    layers = range(len(lean.decoder.layers))
    small, large = begun(lean, 3, room=1), begun(lean, 3, room=128, kept=layers)
    for tokens in text(100, 3).T:
        assert torch.equal(small(tokens), large(tokens))
    assert large.cache.capacity == 128 == small.cache.capacity
    assert set(large.cache.firsts) == {0}


@pytest.mark.parametrize("name", EACH)
def test_a_sequence_gets_the_bits_that_it_gets_alone(name: str) -> None:
    _, lean = lean_of(name)
    ids = text(60, 4)
    alone = [
        torch.cat([step(token) for token in row.split(1)]) for row, step in ((r, begun(lean)) for r in ids)
    ]
    together = begun(lean, 4)
    found = torch.stack([together(tokens) for tokens in ids.T], 1)
    assert torch.equal(found, torch.stack(alone))


@pytest.mark.parametrize("name", quick(tuple(MODELS), "windows"))
def test_a_text_continued_from_a_kept_cache_gets_the_bits_of_one_that_went_on(name: str) -> None:
    _, lean = lean_of(name, torch.bfloat16)
    step = begun(lean, kept=range(len(lean.decoder.layers)))
    ids = text(60)[0]
    for token in ids[:40].split(1):
        step.likeliest(token)
    shown = DynamicCache()
    step.cache.give(shown)
    assert all(layer.keys.dtype == torch.bfloat16 for layer in shown.layers)
    went_on = lean.go_on(shown, START, 40, 64, dtype=torch.int8)
    for token in ids[40:].split(1):
        assert torch.equal(step(token), went_on(token))


def test_batched_texts_move_with_their_powers_of_two() -> None:
    _, lean = lean_of("windows")
    assert lean.native is not None
    ids = text(50, 2)
    alone, steps = [begun(lean), begun(lean)], [begun(lean), begun(lean)]
    for row in range(2):
        for token in ids[row, : 20 + row].split(1):
            alone[row].likeliest(token)
            steps[row].likeliest(token)
    batcher = Batcher(lean.native)
    both = batcher._copied([(step.cache, 0, 0) for step in steps])
    for place in range(20, 45):
        tokens = torch.stack((ids[0, place], ids[1, place + 1]))
        expected = torch.cat([step(token) for step, token in zip(alone, tokens.split(1), strict=True)])
        assert torch.equal(both(tokens), expected)


def generated(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    settings: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, **options}
    made: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return made


@pytest.mark.parametrize("length", [1, 33])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_generate_takes_the_option_for_prompts_of_any_length(
    length: int, dtype: str, tiny_folder: Path
) -> None:
    model = acclimate.init_inference(tiny_folder, dtype=dtype, kv_cache_dtype="int8")
    caches: list[StepCache] = []
    made = NativeStep.__init__

    def noted(self: NativeStep, decoder: Any, held: StepCache, *others: Any) -> None:
        caches.append(held)
        made(self, decoder, held, *others)

    lean_decoder(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeStep, "__init__", noted)
        ids = generated(model, text(length))
    assert ids.shape == (1, length + 30)
    assert [held.dtype for held in caches] == [torch.int8]


def test_a_prompt_whose_beginning_is_known_gets_the_tokens_of_the_whole_one() -> None:
    model, _ = lean_of("plain", torch.bfloat16)
    remembering = RemembersTexts(model, KeyboardInterrupt)
    settings = copy.deepcopy(model.generation_config)
    settings.update(max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)

    def ask(asked: Any, ids: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = asked.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings
        )
        return made

    first = ask(remembering, text(50))
    assert torch.equal(first, ask(model, text(50)))
    longer = torch.cat((first, text(9)), 1)
    assert len(remembering._kept[0].tokens) == first.shape[1] - 1
    same = ask(remembering, longer)[0] == ask(model, longer)[0]
    assert int(same[longer.shape[1] :].long().cumprod(0).sum()) > 3  # other parts of prompts round otherwise


def test_int8_takes_a_little_more_than_half_the_memory() -> None:
    _, lean = lean_of("plain", torch.bfloat16)
    sizes = [
        sum(held.nbytes for part in begun(lean, dtype=dtype).cache._parts for held in part)
        for dtype in (None, torch.int8)
    ]
    size = lean.decoder.layers[0].mixer.head_size
    assert sizes[1] == sizes[0] * (size + -(-size // 16)) // (2 * size)


def test_another_dtype_of_the_cache_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    for name in ("q8_0", "fp8", None):
        with pytest.raises(QuantizationError, match=f"kv_cache_dtype must be auto or int8; it is '{name}'"):
            acclimate.init_inference(tmp_path, kv_cache_dtype=name)  # type: ignore[arg-type]


def test_a_text_of_transformers_loop_says_that_the_option_does_not_apply(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, _ = lean_of("windows")
    with caplog.at_level(logging.WARNING, "acclimate.llm"):
        generated(model, text(5))
        assert "kv_cache_dtype" not in caplog.text
        generated(model, text(5), return_dict_in_generate=True)
    assert "kv_cache_dtype='int8' does not apply" in caplog.text


@pytest.mark.parametrize("together", [1, 16, 64])
def test_parts_of_a_prompt_give_the_bits_of_a_cache_that_drops_nothing(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, lean = lean_of("windows", torch.bfloat16)  # whose proof reads the prompt's tokens together
    assert lean.native is not None
    monkeypatch.setattr(cache, "_LEAST_SPARE", 1)
    monkeypatch.setattr(native, "_READ_TOGETHER", 3 * together)
    if not lean.native.prefills:
        pytest.skip("this processor has no vectors that the kernels know, or has tiles")
    ids = text(90, 3)
    found = []
    for kept in ((), range(2)):
        step = begun(lean, 3, room=8, kept=kept)
        read = step.read(ids, likeliest=False)
        found.append(torch.stack([read, *(step(torch.tensor([9, 8, token])) for token in range(20, 60))]))
    assert torch.equal(*found)
