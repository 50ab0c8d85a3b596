"""Proofs stand near ties of routers, and refuse what is wrong in one layer."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from deep_experts import CHANGES, deep_model

import acclimate
from acclimate.llm.decode import proof
from acclimate.llm.decode.description import (
    Decoder,
    Experts,
    Layer,
    Matrix,
    Norm,
    NotRepresentedError,
    Operation,
    Stack,
)
from acclimate.llm.decode.lean import LeanDecoder
from acclimate.llm.decode.loop import lean_decoder, step_kind
from acclimate.llm.decode.native import NativeDecoder
from acclimate.llm.decode.staleness import has_hooks
from acclimate.llm.decode.trace import Watched, allows
from quick_parameters import quick

Change = Callable[[Any], Any]
LAYERS, CHANGED, LAST = 4, 2, 3


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("layers", [6, 16])
def test_a_deep_model_with_experts_in_bfloat16_takes_the_step(name: str, layers: int) -> None:
    assert step_kind(acclimate.init_inference(deep_model(name, layers))) == "native"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3", "gpt_oss", "gemma4_text", "qwen3_5_moe_text"])
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_deep_quantised_model_with_experts_takes_the_step(name: str, bits: str) -> None:
    model = acclimate.init_inference(deep_model(name, 8), quantize=bits)
    assert step_kind(model) == "native"


@functools.cache
def described(name: str) -> tuple[Any, Decoder]:
    model = acclimate.init_inference(limited(deep_model(name, LAYERS)))
    assert step_kind(model) == "native"
    lean = lean_decoder(model)
    assert lean is not None
    return model, lean.decoder


def limited(model: Any) -> Any:
    """Returns a model whose experts' limits, if they have any, matter for its values."""
    for module in model.modules():
        if hasattr(module, "limit"):
            module.limit = 1.0
    return model


def prove(name: str, change: Change, *, layer: int = CHANGED, draw: int = 1, native: bool = True) -> None:
    """Proves a description of which one layer is changed."""
    model, decoder = described(name)
    layers = [change(own) if i == layer else own for i, own in enumerate(decoder.layers)]
    changed = replace(decoder, layers=tuple(layers))
    lean = LeanDecoder(changed, NativeDecoder(changed) if native else None)
    proof.prove(model, lean, proof.example_tokens(model, draw))


@pytest.mark.parametrize("name", quick(("dots1", "gpt_oss", "gemma4_text", "qwen2_moe"), "dots1"))
@pytest.mark.parametrize("native", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_unchanged_description_is_proved_with_other_tokens(name: str, native: bool) -> None:
    prove(name, lambda layer: layer, native=native)


def experts(**changes: Change) -> Change:
    """Changes fields of a layer's experts; a field's function gets the field."""

    def change(layer: Layer) -> Layer:
        made = {field: function(getattr(layer.mlp, field)) for field, function in changes.items()}
        return replace(layer, mlp=replace(layer.mlp, **made))

    return change


def router(**changes: Any) -> Change:
    return experts(router=lambda own: replace(own, **changed_fields(own, changes)))


def gating(**changes: Any) -> Change:
    return experts(gating=lambda own: replace(own, **changed_fields(own, changes)))


def attention(**changes: Any) -> Change:
    """Changes fields of a layer's attention; a field's function gets the field."""
    return lambda layer: replace(layer, mixer=replace(layer.mixer, **changed_fields(layer.mixer, changes)))


def norms(**changes: Any) -> Change:
    return experts(norms=lambda own: replace(own, **changed_fields(own, changes)))


def changed_fields(own: Any, changes: dict[str, Any]) -> dict[str, Any]:
    return {field: new(getattr(own, field)) if callable(new) else new for field, new in changes.items()}


def without(kind: str) -> Change:
    return lambda operations: tuple(operation for operation in operations if operation.kind != kind)


def scaled(factor: float) -> Change:
    return lambda operations: tuple(
        replace(step, value=step.value * factor) if step.kind == "scale" else step for step in operations
    )


def stacked(change: Callable[[Tensor], Tensor]) -> Change:
    """Changes the weights of all experts, experts x outputs x inputs."""

    def apply(stack: Stack) -> Stack:
        holder = nn.Module()
        weight = getattr(stack.module, stack.name).detach()
        weight = change(weight.transpose(1, 2) if stack.is_turned else weight).contiguous()
        holder.register_parameter(stack.name, nn.Parameter(weight, requires_grad=False))
        return replace(stack, module=holder, is_turned=False)

    return apply


def copied_expert(weight: Tensor) -> Tensor:
    """Gives each fourth expert the weights of the next one."""
    weight = weight.clone()
    weight[::4] = weight[1::4]
    return weight


def exchanged(weight: Tensor) -> Tensor:
    return torch.cat(weight.chunk(2, 1)[::-1], 1)


def with_norm(**changes: Any) -> Change:
    def change(layer: Layer) -> Layer:
        assert isinstance(layer.mlp_norm, Norm)
        return replace(layer, mlp_norm=replace(layer.mlp_norm, **changed_fields(layer.mlp_norm, changes)))

    return change


def matrix(**changes: Any) -> Change:
    def change(own: Matrix) -> Matrix:
        assert isinstance(own, Matrix)
        return replace(own, **changed_fields(own, changes))

    return change


def less(value: int) -> int:
    return value - 1


def more(value: int) -> int:
    return value + 1


def rolled(tensor: Tensor) -> Tensor:
    return tensor.roll(1, 0)


def groups(**changes: Any) -> Change:
    return router(groups=lambda own: replace(own, **changed_fields(own, changes)))


def swapped_results(own: Any) -> Any:
    return replace(own, result=own.shared_result, shared_result=own.result)


WRONG: dict[str, tuple[str, Change]] = {
    "an expert less": ("dots1", router(used=less)),
    "an expert more": ("dots1", router(used=more)),
    "softmax in place of sigmoid": ("dots1", router(scores=(Operation("softmax"),))),
    "no scores, logits": ("dots1", router(scores=())),
    "weights that are not normalized": ("dots1", router(weights=without("normalize"))),
    "weights that are not scaled": ("dots1", router(weights=without("scale"))),
    "weights that are scaled by a fifth more": ("dots1", router(weights=scaled(1.2))),
    "no bias of the choice": ("dots1", router(choice_bias=None)),
    "the bias of the choice of other experts": ("dots1", router(choice_bias=rolled)),
    "no groups": ("dots1", router(groups=None)),
    "a group more": ("dots1", groups(used=more)),
    "groups by their best score alone": ("dots1", groups(best=1)),
    "groups of another size": ("dots1", groups(count=8)),
    "no shared experts": ("dots1", experts(shared=lambda own: None)),
    "another activation of shared experts": (
        "dots1",
        experts(shared=lambda own: replace(own, activation="relu")),
    ),
    "another activation": ("dots1", gating(activation="relu")),
    "gates and ups in turns": ("dots1", experts(interleaved=lambda own: not own)),
    "gates and ups exchanged": ("dots1", experts(inner=stacked(exchanged))),
    "first weights of other experts": ("dots1", experts(inner=stacked(rolled))),
    "second weights of other experts": ("dots1", experts(down=stacked(rolled))),
    "each fourth expert's first weights of the next": ("dots1", experts(inner=stacked(copied_expert))),
    "each fourth expert's second weights of the next": ("dots1", experts(down=stacked(copied_expert))),
    "a norm with one more": ("dots1", with_norm(adds_one=True)),
    "a norm without a weight": ("dots1", with_norm(weight=None)),
    "no bias of the router": ("gpt_oss", router(logits=matrix(bias=None))),
    "the router's rows of other experts": ("gpt_oss", router(logits=matrix(weight=rolled))),
    "no bias before the gate": ("gpt_oss", experts(inner=lambda own: replace(own, bias=None))),
    "no bias of results": ("gpt_oss", experts(down=lambda own: replace(own, bias=None))),
    "biases of other experts": ("gpt_oss", experts(down=lambda own: replace(own, bias=rolled(own.bias)))),
    "another steepness": ("gpt_oss", gating(steepness=1.0)),
    "no limit of gates": ("gpt_oss", gating(gate_limit=None)),
    "no limit of ups": ("gpt_oss", gating(up_limit=None)),
    "nothing added to ups": ("gpt_oss", gating(adds=0.0)),
    "gates before ups": ("gpt_oss", experts(interleaved=lambda own: False)),
    "softmax of all": ("gpt_oss", router(scores=(Operation("softmax"),), weights=())),
    "no factor of each expert": ("gemma4_text", router(factors=None)),
    "factors of other experts": ("gemma4_text", router(factors=rolled)),
    "another factor of the router's input": ("gemma4_text", norms(router_multiplier=1.0)),
    "no weight of the router's norm": ("gemma4_text", norms(router=lambda own: replace(own, weight=None))),
    "no weight of the experts' norm": ("gemma4_text", norms(inner=lambda own: replace(own, weight=None))),
    "norms of results exchanged": ("gemma4_text", experts(norms=swapped_results)),
    "no gate of shared experts": ("qwen2_moe", experts(shared_gate=lambda own: None)),
    "normalized weights": ("qwen2_moe", router(weights=lambda own: (*own, Operation("normalize")))),
    "sigmoid in place of softmax": ("qwen2_moe", router(scores=(Operation("sigmoid"),))),
    "a scale of logits that is a tenth larger": ("qwen3_moe", attention(scale=lambda own: own * 1.1)),
    "no norm of queries": ("qwen3_moe", attention(query_norm=None)),
    "no norm of keys": ("qwen3_moe", attention(key_norm=None)),
    "no positions": ("qwen3_moe", attention(rotary=None)),
    "no sinks": ("gpt_oss", attention(sinks=None)),
    "a window of one less": ("gpt_oss", attention(window=lambda own: 5)),
}  # fmt: skip
"""Faults of one layer of four."""
QUICK = (
    "weights that are scaled by a fifth more", "each fourth expert's second weights of the next",
)  # fmt: skip


# Few tokens show these faults, and the last layer computes one token of a prompt: layers and draws that do.
SELDOM = {
    "groups by their best score alone": [(CHANGED, 0), (CHANGED, 2)],
    "a scale of logits that is a tenth larger": [(CHANGED, draw) for draw in range(3)],
}
ALL = [(layer, draw) for layer in (CHANGED, LAST) for draw in range(3)]


@pytest.mark.parametrize("fault", quick(tuple(WRONG), *QUICK))
def test_a_fault_of_one_layer_is_refused_with_any_tokens(fault: str) -> None:
    name, change = WRONG[fault]
    for layer, draw in SELDOM.get(fault, ALL):
        with pytest.raises(NotRepresentedError, match=r"differ|chooses other experts"):
            prove(name, change, layer=layer, draw=draw)


def test_a_proof_leaves_no_hooks() -> None:
    model, _ = described("dots1")
    assert not has_hooks(model, frozenset())


def test_what_another_thread_asks_of_the_model_is_not_noted() -> None:
    model, decoder = described("dots1")
    watched = Watched(model, decoder, 0.06)
    with torch.no_grad(), watched.noting():
        other = Thread(target=lambda: model(input_ids=torch.arange(3, 9)[None]))
        other.start()
        other.join()
        noted = watched.take()
        assert not noted.inputs
        assert not noted.choices
        model(input_ids=torch.arange(3, 9)[None])
        assert watched.take().choices


def test_a_wrong_router_is_named() -> None:
    with pytest.raises(NotRepresentedError, match=f"the router of layer {CHANGED} chooses other experts"):
        prove("dots1", router(choice_bias=None))


@pytest.mark.parametrize("chosen", [0, 1])
def test_either_of_two_experts_with_equal_rounded_scores_may_be_chosen(chosen: int) -> None:
    router = next(
        layer.mlp.router for layer in described("lfm2_moe")[1].layers if isinstance(layer.mlp, Experts)
    )
    count, used = 32, router.used
    logits = torch.linspace(-3, -2, count)
    others = list(range(2, used + 1))
    logits[others], logits[0], logits[1] = 2.0, 1.0, 1.0005
    router = replace(router, choice_bias=None)
    assert router.scores_of(logits, torch.bfloat16)[:2].unique().numel() == 1
    choice = torch.tensor([[chosen, *others]])
    assert bool(allows(router, logits[None], choice, 1e-5, torch.bfloat16).all())
    assert not bool(allows(router, logits[None], choice + count - used - 1, 1e-5, torch.bfloat16).any())
