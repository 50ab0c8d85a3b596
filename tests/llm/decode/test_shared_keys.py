"""Gemma 4: layers that use another layer's keys and values, tokens with numbers for each layer, values with a
norm, and layers whose results are multiplied."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

import changed_weights
from architectures import BASE, randomise, tiny_model

import acclimate
from acclimate.llm.decode.lean import LeanDecoder
from acclimate.llm.decode.loop import lean_decoder, step_kind
from acclimate.llm.decode.proof import distance
from quick_parameters import quick

PROMPT = torch.arange(3, 12)[None]
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}


def layers(count: int) -> dict[str, Any]:
    """Every other layer has a window, and the others have larger heads."""
    types = ["sliding_attention", "full_attention"] * (count // 2)
    return {
        "num_hidden_layers": count, "layer_types": types, "sliding_window": 6, "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
    }  # fmt: skip


MODELS: dict[str, dict[str, Any]] = {
    "dense": layers(2),
    "values are keys": layers(2) | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "tokens have numbers for layers": layers(4) | {
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 160,
    },
}  # fmt: skip


@functools.cache
def made(name: str) -> Any:
    model: Any = tiny_model("gemma4_text", **MODELS[name])
    for index, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.8 + 0.1 * index)
    return model


@functools.cache
def loaded(name: str) -> Any:
    """The model after ``init_inference``, which tests do not change: to capture it takes a second."""
    return acclimate.init_inference(copy.deepcopy(made(name)))


def lean_of(model: Any) -> LeanDecoder:
    found = lean_decoder(model)
    assert found is not None
    return found


@pytest.mark.parametrize("name", quick(tuple(MODELS), "values are keys", "tokens have numbers for layers"))
def test_texts_are_transformers_past_windows_also_with_padding(name: str) -> None:
    own, ours = made(name), loaded(name)
    assert step_kind(ours) == "native"
    assert torch.equal(ours.generate(PROMPT, **OPTIONS), own.generate(PROMPT, **OPTIONS))
    both = torch.cat((PROMPT, PROMPT.roll(2, -1)))
    mask = torch.ones_like(both)
    mask[1, :3] = 0
    call = {"input_ids": both * mask, "attention_mask": mask, **OPTIONS}
    assert torch.equal(ours.generate(**call), own.generate(**call))


@pytest.mark.parametrize("name", quick(tuple(MODELS), "tokens have numbers for layers"))
def test_a_callers_cache_goes_on_with_transformers(name: str) -> None:
    own, ours = made(name), loaded(name)
    for cache in (DynamicCache(), DynamicCache(config=own.config)):
        first = ours.generate(PROMPT, past_key_values=cache, **OPTIONS)
        more = torch.cat((first, PROMPT), 1)
        expected = own.generate(more, **OPTIONS)
        assert torch.equal(ours.generate(more, past_key_values=copy.deepcopy(cache), **OPTIONS), expected)
        assert torch.equal(own.generate(more, past_key_values=cache, **OPTIONS), expected)


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_quantised_weights_give_the_logits_of_the_modules(weight_format: str) -> None:
    own = copy.deepcopy(made("tokens have numbers for layers")).bfloat16()
    model = acclimate.init_inference(own, quantize=weight_format)
    assert step_kind(model) == "native"
    with torch.no_grad():
        whole, before = model(PROMPT).logits[:, -1].float(), model(PROMPT[:, :-1])
    step = lean_of(model).go_on(before.past_key_values, torch.zeros(1, dtype=torch.long), 8, 9)
    assert distance(step(PROMPT[:, -1]), whole) < 0.1


def test_the_description_names_what_layers_share() -> None:
    decoder = lean_of(loaded("tokens have numbers for layers")).decoder
    assert [layer.mixer.shares for layer in decoder.layers] == [None, None, 0, 1]
    assert [layer.token_input.index for layer in decoder.layers if layer.token_input] == list(range(4))
    assert len(decoder.own_mixers) == 2
    inputs = decoder.token_inputs
    assert inputs is not None
    assert (inputs.size, inputs.table_multiplier, inputs.product_multiplier) == (16, 4.0, 0.125)


def test_a_token_without_numbers_for_layers_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        loaded("tokens have numbers for layers").generate(torch.tensor([[3, 160, 4]]), **OPTIONS)


def changed(name: str, change: Any) -> Any:
    """Returns a model whose layers are changed, and one of ``init_inference``."""
    own = copy.deepcopy(made(name))
    change(own)
    return own, acclimate.init_inference(copy.deepcopy(own))


def other_numbers(model: Any) -> None:
    """Two layers use each other's numbers."""
    own: Any = type(model.model)
    project = own.project_per_layer_inputs

    def swapped(self: Any, *args: Any) -> torch.Tensor:
        return project(self, *args)[:, :, [1, 0, 2, 3]]  # type: ignore[no-any-return]

    model.model.__class__ = type("Swapped", (own,), {"project_per_layer_inputs": swapped})


def louder_values(model: Any) -> None:
    """A layer that shares values uses twice of them."""
    layer = model.model.layers[2].self_attn
    own: Any = type(layer)

    def forward(self: Any, *args: Any, shared_kv_states: Any, **others: Any) -> Any:
        kept = shared_kv_states[self.layer_type]
        shared_kv_states[self.layer_type] = kept[0], kept[1] * 2
        found = own.forward(self, *args, shared_kv_states=shared_kv_states, **others)
        shared_kv_states[self.layer_type] = kept
        return found

    layer.__class__ = type("Louder", (own,), {"forward": forward})


@pytest.mark.parametrize("change", [pytest.param(other_numbers, marks=pytest.mark.slow), louder_values])
def test_a_changed_share_is_computed(change: Any) -> None:
    own, ours = changed("tokens have numbers for layers", change)
    assert torch.equal(ours.generate(PROMPT, **OPTIONS), own.generate(PROMPT, **OPTIONS))


def test_the_benchmark_counts_one_row_of_the_table_of_tokens_numbers() -> None:
    from acclimate.llm.commands.benchmark import describe_weights

    model = acclimate.init_inference(copy.deepcopy(made("tokens have numbers for layers")))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # not tied
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    assert len(tables) == 2
    read = sum(p.nbytes for p in model.parameters()) - sum(table.weight.nbytes for table in tables)
    assert describe_weights(model).bytes_per_token == read


def test_a_layers_multiplier_that_changes_later_counts() -> None:
    models = made("values are keys"), loaded("values are keys")
    before = models[1].generate(PROMPT, **OPTIONS)
    scalars = [model.model.layers[1].layer_scalar for model in models]
    with changed_weights.changed(*scalars):
        for scalar in scalars:
            scalar.fill_(-2.0)
        expected, found = (model.generate(PROMPT, **OPTIONS) for model in models)
    assert torch.equal(found, expected)
    assert not torch.equal(found, before)


def of_images() -> Any:
    """A Gemma 4 as it is published, which reads images too, in the place of the tokens 150, 153 and 154."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "gemma4", text_config={**BASE, **MODELS["tokens have numbers for layers"]}, audio_config=None,
        vision_config={**vision, "num_key_value_heads": 2, "head_dim": 16}, image_token_id=150,
        audio_token_id=153, video_token_id=154, boi_token_id=151, eoi_token_id=152,
    )  # fmt: skip
    return randomise(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def test_a_model_of_images_writes_texts_also_of_the_tokens_in_whose_place_images_come() -> None:
    own = of_images()
    ours = acclimate.init_inference(copy.deepcopy(own))
    lean = lean_of(ours)
    assert step_kind(ours) == "native"
    assert lean.decoder.replaced_tokens == ((150, 153, 154), 0)
    for token in (5, 150):
        prompt = PROMPT.index_fill(1, torch.tensor([4]), token)
        assert torch.equal(ours.generate(prompt, **OPTIONS), own.generate(prompt, **OPTIONS))
    step, plain = (
        decoder.go_on(own(PROMPT).past_key_values, torch.zeros(1, dtype=torch.long), 9, 11)
        for decoder in (lean, LeanDecoder(lean.decoder, None))
    )
    for token in (154, 7):
        assert distance(step(torch.tensor([token])), plain(torch.tensor([token]))) < 1e-4
    assert lean_of(ours) is lean  # its configurations can be compared: it is not captured for each text
