"""Native code reads a prompt: many tokens of several sequences in one call."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import tiny_model

import acclimate
from acclimate.llm.decode import native
from acclimate.llm.decode.loop import lean_decoder
from acclimate.llm.decode.native import NativeStep
from acclimate.llm.kernels import builder as kernels
from acclimate.ops import simd
from quick_parameters import quick

FEW = ["gemma3_text", "gpt2"]
MANY = [
    "deepseek_v3",
    "phi3",
    "cohere",
    "llama",
    "mistral",
    "qwen3",
    "gemma2",
    "phi",
    "gpt_neox",
    "olmo2",
    "glm4",
    "smollm3",
    "exaone4",
    "ministral3",
    "deepseek_v2",
]
ALL = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in MANY)]
WINDOWED = {"mistral", "gemma2", "gemma3_text", "exaone4"}
LENGTH = 45


@functools.cache
def model_of(name: str, quantize: str | None = None) -> Any:
    """Returns a model, which tests do not change."""
    model = tiny_model(name, **({"sliding_window": 6} if name in WINDOWED else {}))
    return acclimate.init_inference(model.to(torch.bfloat16), quantize=quantize)


def reader(model: Any, starts: torch.Tensor, room: int = LENGTH) -> NativeStep:
    lean = lean_decoder(model)
    assert lean is not None
    step = lean.begin(starts, room)
    if step is None:
        pytest.skip("this processor has no vectors that the kernels know, or has tiles")
    return step


def padded_prompt() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = (torch.arange(3 * LENGTH) * 7 % 150 + 3).view(3, LENGTH)
    starts = torch.tensor([0, 5, LENGTH - 1])
    mask = (torch.arange(LENGTH)[None] >= starts[:, None]).long()
    return ids, starts, mask


@torch.no_grad()
def computed(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions)
    logits: torch.Tensor = out.logits[:, -1].float()
    return logits


def check_logits(name: str) -> None:
    """Raises unless the logits of a padded batch are as near to those in float32 as the model's own."""
    model = model_of(name)
    ids, starts, mask = padded_prompt()
    step = reader(model, starts)
    exact, own = computed(copy.deepcopy(model).float(), ids, mask), computed(model, ids, mask)
    read = step.read(ids, likeliest=False)
    size = exact.norm(dim=-1)
    error, own_error = (read - exact).norm(dim=-1) / size, (own - exact).norm(dim=-1) / size
    assert (error <= 2 * own_error + 0.01).all(), (error, own_error)


@pytest.mark.parametrize("name", ALL)
def test_logits_of_a_padded_batch_are_as_near_to_float32_as_the_models(name: str) -> None:
    check_logits(name)


# Each set has its own products, and one has its own activations: GELU and SiLU.
@pytest.mark.parametrize("name", quick(("gemma3_text", "llama"), "llama"))
@pytest.mark.parametrize("isa", [isa for isa in simd.usable_isas() if isa != "plain"])
def test_every_instruction_set_reads_a_prompt(name: str, isa: str) -> None:
    kernels.load("cpu")
    torch.ops.acclimate.inference_use_isa(simd.isa_number(isa))
    try:
        check_logits(name)
    finally:
        torch.ops.acclimate.inference_use_isa(simd.BEST)


def test_the_cache_goes_on_where_the_prompt_ended() -> None:
    model = model_of("gemma3_text")
    ids, starts, _ = padded_prompt()
    ids, starts = ids[starts < LENGTH - 3], starts[starts < LENGTH - 3]  # a step takes no padding
    assert len(ids) > 1
    whole = reader(model, starts).read(ids, likeliest=False)
    step = reader(model, starts, LENGTH - 3)
    step.read(ids[:, :-3], likeliest=True)
    for place in range(LENGTH - 3, LENGTH):
        last = step(ids[:, place])
    assert (last - whole).norm() <= 0.03 * whole.norm()


# No part is of one token: that would be a step, which adds up in another order.
@pytest.mark.parametrize("together", [3, 24])
def test_a_prompt_in_parts_gives_the_bits_of_the_whole(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("gpt2")
    ids, starts = padded_prompt()[0][:1], torch.zeros(1, dtype=torch.long)
    whole = reader(model, starts).read(ids, likeliest=False)
    monkeypatch.setattr(native, "_READ_TOGETHER", together)
    assert torch.equal(reader(model, starts).read(ids, likeliest=False), whole)


def test_the_number_of_threads_changes_no_bit_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gemma3_text")
    ids, starts, _ = padded_prompt()
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(native, "kernel_threads", lambda threads=threads: threads)
        found.append(reader(model, starts).read(ids, likeliest=False))
    assert torch.equal(*found)


@pytest.mark.parametrize("quantize", quick(("int8", "int4"), "int4"))
@pytest.mark.parametrize("name", quick(("gemma3_text", "gpt2"), "gemma3_text"))
def test_quantised_weights_read_a_prompt(name: str, quantize: str) -> None:
    model = model_of(name, quantize)
    ids, starts, mask = padded_prompt()
    read = reader(model, starts).read(ids, likeliest=False)
    own = computed(model, ids, mask)
    assert (read - own).norm() <= 0.03 * own.norm()


def test_generate_reads_the_prompt_without_the_models_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gemma3_text")
    ids, starts, mask = padded_prompt()
    reader(model, starts)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the prompt is read by modules")

    refuse.__module__ = type(model)._prefill.__module__  # a user's own loop would be left to transformers
    monkeypatch.setattr(type(model), "_prefill", refuse)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 2, "pad_token_id": 0}
    text = model.generate(ids, **options)
    step = reader(model, starts)
    first = step.read(ids, likeliest=True)
    assert torch.equal(text[:, LENGTH:], torch.stack((first, step.likeliest(first)), 1))


def test_a_prompt_longer_than_learned_positions_is_torchs_error() -> None:
    model = model_of("gpt2")
    prompt = torch.ones((1, model.config.max_position_embeddings + 1), dtype=torch.long)
    step = reader(model, torch.zeros(1, dtype=torch.long))
    with pytest.raises(IndexError, match="index out of range"):
        step.read(prompt, likeliest=True)
