"""Layers with a sliding window keep only what their next queries see, and texts stay transformers'."""

from __future__ import annotations

import copy
import functools
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from quick_parameters import quick

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import tiny_model
from padded_prompts import padded_batch

import acclimate
from acclimate.llm.decode import cache, loop, native
from acclimate.llm.decode.cache import StepCache
from acclimate.llm.decode.lean import LeanDecoder
from acclimate.llm.decode.loop import lean_decoder, step_kind
from acclimate.llm.decode.native import NativeStep
from acclimate.llm.decode.plain import PlainStep

WINDOW = 6
TYPES = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "all layers": ("mistral", {}),
    "every second layer": ("gemma3_text", TYPES),
    "a long window": ("gemma3_text", {**TYPES, "sliding_window": 40}),
    "a window of two": ("mistral", {"sliding_window": 2}),
    "experts and sinks": ("gpt_oss", TYPES),
}
NEW = 60


@functools.cache
def pair(name: str) -> tuple[Any, Any]:
    """A tiny model of transformers, and the same one from ``init_inference``."""
    kind, changes = MODELS[name]
    model = tiny_model(kind, **{"sliding_window": WINDOW, "max_position_embeddings": 512, **changes})
    return model, acclimate.init_inference(copy.deepcopy(model))


@pytest.fixture(
    params=[
        pytest.param(1, id="moves at each token"),
        pytest.param(64, id="moves seldom", marks=pytest.mark.slow),
    ]
)
def spare(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count: int = request.param
    monkeypatch.setattr(cache, "_LEAST_SPARE", count)
    return count


@pytest.mark.parametrize("name", quick(tuple(MODELS), "every second layer"))
def test_a_padded_batch_gets_the_tokens_of_transformers_far_past_the_window(
    name: str, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "ROOM", 4)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    plain, fast = (model.generate(**padded_batch(), **options) for model in pair(name))
    assert step_kind(pair(name)[1]) == "native"
    assert torch.equal(plain, fast)


def kept_bytes(step: Any, layer: int) -> int:
    tensors = step.cache.keys[layer], step.cache.values[layer]
    return sum(int(tensor.untyped_storage().nbytes()) for tensor in tensors)


def test_a_layer_with_a_window_takes_memory_for_the_window_and_one_without_for_the_text() -> None:
    lean = lean_decoder(pair("every second layer")[1])
    assert lean is not None
    step = lean.begin(torch.zeros(1, dtype=torch.long), 4096) or lean.go_on(
        None, torch.zeros(1).long(), 0, 4096
    )
    token = torch.tensor([5])
    for _ in range(300):
        token = step.likeliest(token)
    of_token = kept_bytes(step, 1) // 4096
    assert kept_bytes(step, 0) <= (WINDOW + cache._LEAST_SPARE) * of_token
    assert step.cache.firsts[0] > 200


def random_text(length: int) -> torch.Tensor:
    return torch.randint(3, 150, (1, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["native", "plain"])
@pytest.mark.parametrize("name", quick(tuple(MODELS), "every second layer"))
def test_logits_of_random_text_are_transformers(name: str, kind: str, spare: int) -> None:
    model, fast = pair(name)
    lean = lean_decoder(fast)
    assert lean is not None
    used = lean if kind == "native" else LeanDecoder(lean.decoder, None)
    step = used.go_on(None, torch.zeros(1).long(), 0, 8)
    assert isinstance(step, PlainStep if kind == "plain" else NativeStep)
    ids = random_text(150)
    with torch.no_grad():
        expected = model(ids).logits[0]
    found = torch.cat([step(token) for token in ids[0].split(1)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@functools.cache
def in_bfloat16() -> Any:
    return acclimate.init_inference(copy.deepcopy(pair("every second layer")[0]).to(torch.bfloat16))


@pytest.mark.parametrize("together", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 16, 64))])
def test_a_prompt_in_parts_gives_the_bits_of_a_cache_that_drops_nothing(
    together: int, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lean = lean_decoder(in_bfloat16())
    assert lean is not None
    assert lean.native is not None
    if not lean.native.prefills:
        pytest.skip("this processor has no vectors that the kernels know, or has tiles")
    monkeypatch.setattr(native, "_READ_TOGETHER", 3 * together)
    ids = (torch.arange(3 * 90) * 7 % 150 + 3).view(3, 90)
    starts = torch.tensor([0, 5, 60])
    found = []
    for kept in ((), range(2)):
        held = StepCache(lean.decoder, 3, torch.device("cpu"), 8, values_by_column=True, kept=kept)
        step = NativeStep(lean.native, held, starts if together > 1 else torch.zeros(3).long())
        read = step.read(ids, likeliest=False)
        found.append(torch.stack([read, *(step(torch.tensor([9, 8, token])) for token in range(20, 60))]))
    assert torch.equal(*found)
    assert held.firsts == [0, 0]


def given(model: Any, kind: str) -> DynamicCache:
    return DynamicCache(config=model.config) if kind == "windows" else DynamicCache()


def shown(cache: DynamicCache) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("kind", quick(("windows", "whole"), "windows"))
@pytest.mark.parametrize("name", quick(("all layers", "every second layer"), "every second layer"))
def test_a_cache_of_the_caller_gets_what_transformers_puts_into_it(name: str, kind: str, spare: int) -> None:
    found = []
    for model in pair(name):
        cache, ids = given(model, kind), torch.tensor([[0, 20, 30, 40]])
        for more in (30, 40, 2):
            ids = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=more,
                do_sample=False,
                eos_token_id=None,
            )
            ids = torch.cat((ids, torch.tensor([[50, 60]])), 1)
        found.append((ids.tolist(), cache.get_seq_length(), shown(cache)))
    assert found[0][:2] == found[1][:2]
    for plain, fast in zip(found[0][2], found[1][2], strict=True):
        torch.testing.assert_close(plain, fast, atol=1e-4, rtol=1e-4)


def test_a_cache_is_cropped_behind_the_window_and_continued(spare: int) -> None:
    texts = []
    for model in pair("every second layer"):
        cache, ids = DynamicCache(), torch.tensor([[0, 20, 30, 40]])
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "past_key_values": cache}
        ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, **options)
        cache.crop(20 - cache.get_seq_length())
        ids = torch.cat((ids[:, :20], torch.tensor([[50, 60]])), 1)
        texts.append(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, **options))
    assert torch.equal(*texts)


def test_ctrl_c_in_the_middle_of_a_move_leaves_the_text_as_it_was(
    spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fast = pair("every second layer")
    ids = random_text(150)
    with torch.no_grad():
        expected = model(ids).logits[0]
    lean = lean_decoder(fast)  # its proof moves a cache, too
    assert lean is not None
    calls, moved = [0], StepCache._make_room

    def interrupted(self: StepCache, index: int, length: int) -> None:
        calls[0] += 1
        if calls[0] == 2:
            signal.raise_signal(signal.SIGINT)
        moved(self, index, length)

    monkeypatch.setattr(StepCache, "_make_room", interrupted)
    step = lean.go_on(None, torch.zeros(1).long(), 0, 8)
    found: list[torch.Tensor] = []
    with pytest.raises(KeyboardInterrupt):
        found.extend(step(token) for token in ids[0].split(1))
    assert 0 < len(found) == step.cache.length < ids.shape[1]
    found += [step(token) for token in ids[0, len(found) :].split(1)]
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-4)
