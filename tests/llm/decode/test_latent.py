"""Models with latent attention take the native step, and write transformers' text."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quick_parameters import quick

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import randomise, tiny_config, tiny_model
from transformers import DynamicCache

import acclimate
from acclimate.llm.decode import native, proof
from acclimate.llm.decode.lean import LeanDecoder
from acclimate.llm.decode.loop import lean_decoder, step_kind

PROMPT = torch.arange(3, 12)[None]
ALWAYS = {"do_sample": False, "eos_token_id": None}
LONG = {"max_position_embeddings": 512, "v_head_dim": 24}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.8,
}  # fmt: skip
SIZES = {
    "q_lora_rank": 32, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
MISTRAL_4 = {
    **SIZES, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.7},
}  # fmt: skip
QUICK = ("v3",)
"""The second start also reads a v2."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("deepseek_v3", {}),
    "v3, halves, no inner queries": ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None}),
    "v3, yarn, biases": ("deepseek_v3", {"rope_parameters": YARN, "attention_bias": True}),
    "v3, groups, not normalized": ("deepseek_v3", {**GROUPS, "norm_topk_prob": False}),
    "v3, dense": ("deepseek_v3", {"first_k_dense_replace": 2, "qk_nope_head_dim": 40}),
    "v2": ("deepseek_v2", {}),
    "v2, yarn, no inner queries": ("deepseek_v2", {"rope_parameters": YARN, "q_lora_rank": None}),
    "v2, groups, all experts": (
        "deepseek_v2",
        {**GROUPS, "topk_method": "group_limited_greedy", "first_k_dense_replace": 0},
    ),
    "minicpm3": ("minicpm3", {**SIZES, "scale_emb": 3, "scale_depth": 1.2, "dim_model_base": 32}),
    "youtu": ("youtu", SIZES),
    "queries scaled by position": ("mistral4", {}),
}  # fmt: skip
"""What is special about each."""


def mistral4() -> Any:
    """A model that transformers' automatic classes do not list."""
    from transformers import Mistral4ForCausalLM

    torch.manual_seed(0)
    return randomise(Mistral4ForCausalLM(tiny_config("mistral4", **LONG, **MISTRAL_4)).eval())


@functools.cache
def pair(name: str) -> tuple[Any, Any]:
    """A tiny model of transformers, and the same one from ``init_inference``."""
    kind, changes = MODELS[name]
    model = mistral4() if kind == "mistral4" else tiny_model(kind, **LONG, **changes)
    return model, acclimate.init_inference(copy.deepcopy(model))


@pytest.mark.parametrize("name", quick(tuple(MODELS), *QUICK))
def test_a_text_of_latent_attention_is_transformers(name: str) -> None:
    own, ours = pair(name)
    assert step_kind(ours) == "native"
    assert torch.equal(*(model.generate(PROMPT, max_new_tokens=120, **ALWAYS) for model in (own, ours)))


def prompts(count: int) -> dict[str, Tensor]:
    ids = PROMPT.repeat(count, 1) + 16 * torch.arange(count)[:, None]
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids % 160, "attention_mask": mask}


@pytest.mark.parametrize("name", quick(tuple(MODELS), *QUICK))
def test_padded_sequences_get_transformers_tokens(name: str) -> None:
    texts = [model.generate(**prompts(5), max_new_tokens=20, **ALWAYS) for model in pair(name)]
    assert torch.equal(*texts)


@torch.no_grad()
def logits_of_steps(step: Any, tokens: Tensor) -> Tensor:
    return torch.stack([step(token[None])[0] for token in tokens])


@torch.no_grad()
def logits_after_a_prompt(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of transformers and of the native step, one token after the other."""
    lean = lean_decoder(model)
    assert lean is not None
    begun = model(input_ids=PROMPT, use_cache=True)
    step = lean.go_on(begun.past_key_values, torch.zeros(1, dtype=torch.long), PROMPT.shape[1], 16)
    found = logits_of_steps(step, tokens)
    cache, expected = begun.past_key_values, []
    for token in tokens:
        expected.append(model(input_ids=token[None, None], past_key_values=cache).logits[0, -1])
    return torch.stack(expected), found


@torch.no_grad()
def logits_of_texts(model: Any, tokens: Tensor) -> Tensor:
    """Logits of a model after a prompt and each of some tokens, without a cache."""
    whole = torch.cat((PROMPT, tokens[None]), 1)
    logits: Tensor = model(whole).logits[0, PROMPT.shape[1] :]
    return logits


@pytest.mark.parametrize("name", quick(tuple(MODELS), *QUICK))
def test_logits_in_float32_are_the_models(name: str) -> None:
    expected, found = logits_after_a_prompt(pair(name)[1], torch.arange(60) * 7 % 150 + 3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3", "v2", "queries scaled by position"])
def test_bfloat16_errs_no_more_than_the_model_does(name: str) -> None:
    exact = pair(name)[0]
    ours = acclimate.init_inference(copy.deepcopy(exact).bfloat16())
    assert step_kind(ours) == "native"  # only after its logits, of a prompt too, were compared
    tokens = torch.arange(60) * 7 % 150 + 3
    expected = logits_of_texts(exact, tokens)
    own, found = (logits.float() - expected for logits in logits_after_a_prompt(ours, tokens))
    assert float(found.square().mean()) < 2 * float(own.square().mean())


@pytest.mark.parametrize("name", quick(tuple(MODELS), *QUICK))
def test_the_plain_step_computes_latent_attention_like_the_model(name: str) -> None:
    own, ours = pair(name)
    lean = lean_decoder(ours)
    assert lean is not None
    proof.prove(own, LeanDecoder(lean.decoder, None), PROMPT.repeat(1, 2)[:, :11])


@pytest.mark.parametrize("name", quick(("v3", "v2"), "v3"))
def test_a_cache_of_the_callers_holds_transformers_latents_afterwards(name: str) -> None:
    caches = [DynamicCache(), DynamicCache()]
    for _ in range(2):  # the second text continues the first
        texts = []
        for model, cache in zip(pair(name), caches, strict=True):
            start = torch.arange(3, 12 + cache.get_seq_length())[None] % 150
            texts.append(model.generate(start, past_key_values=cache, max_new_tokens=6, **ALWAYS))
        assert torch.equal(*texts)
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        for expected, found in ((own.keys, own.values) for own in layers):
            assert expected.shape[-1] in (24, 32), found.shape
        torch.testing.assert_close(layers[1].keys, layers[0].keys)
        torch.testing.assert_close(layers[1].values, layers[0].values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        ("v3, groups, not normalized", "int8"),
        ("v2, groups, all experts", "int4"),
        ("v3, groups, not normalized", "int4"),
        ("v2, groups, all experts", "int8"),
    ],
)
def test_quantised_weights_take_the_native_step(name: str, quantize: str) -> None:
    ours = acclimate.init_inference(copy.deepcopy(pair(name)[0]), quantize=quantize)
    assert step_kind(ours) == "native"  # only after its logits were compared with the modules'
    tokens = torch.arange(40) * 7 % 150 + 3
    own, found = logits_after_a_prompt(ours, tokens)
    exact = copy.deepcopy(pair(name)[0])
    exact.load_state_dict(ours.state_dict())
    expected = logits_of_texts(exact, tokens)
    errors = [float((logits - expected).norm() / expected.norm()) for logits in (found, own)]
    assert errors[0] < 1.2 * errors[1] < 0.3


@functools.cache
def long_text() -> Tensor:
    text: Tensor = pair("v3")[0].generate(PROMPT, max_new_tokens=200, **ALWAYS)
    return text


@pytest.mark.parametrize("threads", [1, 3, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_threads_share_the_latents_of_a_text(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernel_threads", lambda: threads)
    assert torch.equal(pair("v3")[1].generate(PROMPT, max_new_tokens=200, **ALWAYS), long_text())


@pytest.mark.usefixtures("own_descriptions")
@pytest.mark.parametrize("name", quick(("v3, yarn, biases", "v2, yarn, no inner queries")))
def test_the_second_start_reads_the_saved_description(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = pair(name)[0]
    own.save_pretrained(tmp_path / "model")
    proofs: list[Any] = []
    prove = proof.prove
    monkeypatch.setattr(proof, "prove", lambda *given: (proofs.append(given), prove(*given)))
    expected = own.generate(PROMPT, max_new_tokens=60, **ALWAYS)
    for _ in range(2):
        ours = acclimate.init_inference(tmp_path / "model", dtype="float32")
        assert torch.equal(ours.generate(PROMPT, max_new_tokens=60, **ALWAYS), expected)
    assert len(proofs) == 1


@pytest.mark.slow
def test_weights_that_change_between_texts_count() -> None:
    own, ours = (copy.deepcopy(model) for model in pair("v3"))
    ours.generate(PROMPT, max_new_tokens=3, **ALWAYS)
    for model in (own, ours):
        model.model.layers[0].self_attn.kv_b_proj.weight.data.mul_(-1.5)
    assert step_kind(ours) == "native"
    assert torch.equal(*(model.generate(PROMPT, max_new_tokens=20, **ALWAYS) for model in (own, ours)))


Expand = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]


def limited_keys(own: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = type(own).__mro__[1].expand_kv(own, latents, rotated)
    return keys.clamp(-0.5, 0.5), values


def louder_values(own: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = type(own).__mro__[1].expand_kv(own, latents, rotated)
    return keys, values * 1.7


def louder_latents(own: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return type(own).__mro__[1].expand_kv(own, latents * 1.3, rotated)


def reversed_keys(own: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = type(own).__mro__[1].expand_kv(own, latents, rotated.flip(-1))
    return keys, values


def heads_in_reverse(own: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = type(own).__mro__[1].expand_kv(own, latents, rotated)
    return keys.flip(1), values


def rotated_first(own: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = type(own).__mro__[1].expand_kv(own, latents, rotated)
    return keys.roll(8, -1), values


def half_written(own: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = type(own).__mro__[1].expand_kv(own, latents, rotated)
    made = keys.new_zeros(keys.shape)
    made[..., 8:].copy_(keys[..., 8:])
    return made, values


def written_twice(own: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = type(own).__mro__[1].expand_kv(own, latents, rotated)
    made = keys.new_empty(keys.shape)
    made[..., :].copy_(keys)
    part = made[..., :4]
    part.mul_(2)
    return made, values


ODD: list[Expand] = [
    limited_keys, louder_values, louder_latents, reversed_keys, heads_in_reverse, rotated_first, half_written,
    written_twice,
]  # fmt: skip


@pytest.mark.parametrize(
    "expand",
    quick({expand.__name__: expand for expand in ODD}, "written_twice"),
)
def test_keys_and_values_that_are_made_otherwise_are_computed(expand: Expand) -> None:
    model = copy.deepcopy(pair("v3")[0])
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Odd", (type(layer.self_attn),), {"expand_kv": expand})
    own, ours = copy.deepcopy(model), acclimate.init_inference(model)
    text = own.generate(PROMPT, max_new_tokens=30, **ALWAYS)
    assert torch.equal(ours.generate(PROMPT, max_new_tokens=30, **ALWAYS), text)
    assert not torch.equal(text, pair("v3")[0].generate(PROMPT, max_new_tokens=30, **ALWAYS))


@pytest.mark.slow
def test_a_bias_of_the_expanding_module_is_computed() -> None:
    model = copy.deepcopy(pair("v3")[0])
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.bias = nn.Parameter(torch.linspace(-1, 1, 4 * 40))
    own, ours = copy.deepcopy(model), acclimate.init_inference(model)
    texts = [loaded.generate(PROMPT, max_new_tokens=30, **ALWAYS) for loaded in (own, ours)]
    assert torch.equal(*texts)
