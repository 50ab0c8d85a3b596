"""Models with experts take the native step, and write transformers' text."""

from __future__ import annotations

import copy
import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quick_parameters import quick

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import GEMMA4_EXPERTS, tiny_model

import acclimate
from acclimate.llm.decode import proof
from acclimate.llm.decode.description import Experts, NotRepresentedError
from acclimate.llm.decode.lean import LeanDecoder
from acclimate.llm.decode.loop import lean_decoder, step_kind
from acclimate.llm.decode.native import NativeDecoder

PROMPT = torch.arange(3, 12)[None]
ALWAYS = {"do_sample": False, "eos_token_id": None}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("olmoe", {"num_experts": 8}),
    "softmax of many": (
        "qwen3_moe",
        {"num_experts": 130, "norm_topk_prob": True, "moe_intermediate_size": 16},
    ),
    "weights in float32": ("mixtral", {}),
    "shared, with a gate": ("qwen2_moe", {}),
    "softmax of the chosen": ("granitemoe", {}),
    "sigmoid, groups, shared": ("dots1", {**GROUPS, "norm_topk_prob": True}),
    "groups, not normalized": ("glm4_moe", {**GROUPS, "norm_topk_prob": False}),
    "a least sum": ("ernie4_5_moe", {}),
    "biases, limits, by column": ("gpt_oss", {"sliding_window": 6}),
    "norms of their own": ("gemma4_text", GEMMA4_EXPERTS),
}
"""What is special about each."""
EACH = quick(tuple(MODELS), "sigmoid, groups, shared", "biases, limits, by column")


@functools.cache
def pair(name: str) -> tuple[Any, Any]:
    """A tiny model of transformers, and the same one from ``init_inference``."""
    kind, changes = MODELS[name]
    model = tiny_model(kind, **changes)
    return model, acclimate.init_inference(copy.deepcopy(model))


def prompts(count: int) -> dict[str, torch.Tensor]:
    ids = PROMPT.repeat(count, 1) + 16 * torch.arange(count)[:, None]
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    mask[2, :5] = 0
    return {"input_ids": ids % 160, "attention_mask": mask}


@pytest.mark.parametrize("name", EACH)
def test_a_text_of_experts_is_transformers(name: str) -> None:
    own, ours = pair(name)
    texts = [model.generate(PROMPT, max_new_tokens=25, **ALWAYS) for model in (own, ours)]
    assert step_kind(ours) == "native"
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", EACH)
def test_padded_sequences_that_use_the_same_experts_get_transformers_tokens(name: str) -> None:
    texts = [model.generate(**prompts(8), max_new_tokens=20, **ALWAYS) for model in pair(name)]
    assert torch.equal(*texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_experts_in_bfloat16_give_transformers_logits(name: str) -> None:
    model = copy.deepcopy(pair(name)[0]).bfloat16()
    ours = acclimate.init_inference(model)
    assert step_kind(ours) == "native"  # only after its logits, of a prompt too, were compared


@pytest.mark.parametrize("name", EACH)
def test_the_plain_step_computes_experts_like_the_model(name: str) -> None:
    own, ours = pair(name)
    lean = lean_decoder(ours)
    assert lean is not None
    proof.prove(own, LeanDecoder(lean.decoder, None), PROMPT.repeat(1, 2)[:, :11])


def experts_of(name: str) -> Experts:
    lean = lean_decoder(pair(name)[1])
    assert lean is not None
    experts = lean.decoder.layers[-1].mlp
    assert isinstance(experts, Experts)
    return experts


def test_a_router_is_read_from_its_operators() -> None:
    router = experts_of("sigmoid, groups, shared").router
    assert [step.kind for step in router.scores] == ["sigmoid"]
    assert [(step.kind, step.value) for step in router.weights] == [("normalize", 1e-20), ("scale", 2.5)]
    assert router.groups is not None
    assert (router.groups.count, router.groups.used, router.groups.best) == (4, 2, 2)
    gating = experts_of("biases, limits, by column").gating
    assert (gating.steepness, gating.gate_limit, gating.up_limit, gating.adds) == (1.702, 7.0, 7.0, 1.0)


def test_norms_and_factors_of_experts_are_read() -> None:
    experts = experts_of("norms of their own")
    own = pair("norms of their own")[1].model.layers[-1]
    norms, factors = experts.norms, experts.router.factors
    assert norms is not None
    assert factors is own.router.per_expert_scale
    assert norms.router_multiplier == own.hidden_size**-0.5
    given = (own.router.scale, own.pre_feedforward_layernorm_2.weight)
    results = (own.post_feedforward_layernorm_2.weight, own.post_feedforward_layernorm_1.weight)
    assert (norms.router.weight, norms.inner.weight) == given
    assert (norms.result.weight, norms.shared_result.weight) == results


@pytest.mark.slow
def test_a_router_of_the_chosen_and_a_gate_of_shared_experts_are_read() -> None:
    assert [step.kind for step in experts_of("softmax of the chosen").router.weights] == ["softmax"]
    assert experts_of("shared, with a gate").shared_gate is not None


def test_experts_of_another_packages_function_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward

    def half(module: Any, *args: Any) -> torch.Tensor:
        return batched_mm_experts_forward(module, *args) / 2

    ExpertsInterface.register("half_of_a_test", half)
    model = copy.deepcopy(pair("softmax")[0])
    model.set_experts_implementation("half_of_a_test")
    ours = acclimate.init_inference(model)
    with caplog.at_level("INFO", logger="acclimate.llm"):
        assert step_kind(ours) == "transformers"
    assert "its experts are computed by a function of another package" in caplog.text


@pytest.mark.slow
def test_experts_with_a_forward_of_the_users_are_captured_by_it() -> None:
    own, _ = pair("softmax")
    model = copy.deepcopy(own)

    class Twice(type(model.model.layers[0].mlp.experts)):  # type: ignore[misc]
        def forward(self, *args: Any) -> torch.Tensor:
            return super().forward(*args) + super().forward(*args)

    for layer in model.model.layers:
        layer.mlp.experts.__class__ = Twice
    ours = acclimate.init_inference(copy.deepcopy(model))
    texts = [net.generate(PROMPT, max_new_tokens=20, **ALWAYS) for net in (model, ours)]
    assert torch.equal(*texts)


def test_a_near_tie_of_a_router_is_no_reason_to_refuse_and_a_wrong_router_is() -> None:
    model = acclimate.init_inference(tiny_model("granitemoe_swa").bfloat16())
    assert step_kind(model) == "native"
    lean = lean_decoder(model)
    assert lean is not None
    layers = [
        replace(layer, mlp=replace(layer.mlp, router=replace(layer.mlp.router, used=1)))
        for layer in lean.decoder.layers
        if isinstance(layer.mlp, Experts)
    ]
    assert len(layers) == 2
    wrong = replace(lean.decoder, layers=tuple(layers))
    with pytest.raises(NotRepresentedError, match="differ"):
        proof.prove(model, LeanDecoder(wrong, NativeDecoder(wrong)), proof.example_tokens(model))
