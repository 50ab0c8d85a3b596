"""Attempts to make the native step compute something else than the model's own program, silently.

Each case changes a plain copy of the model in the same way, and expects its tokens.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quick_parameters import quick

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import tiny_model
from transformers import DynamicCache, StoppingCriteria
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import acclimate
from acclimate.errors import ModelChangedError
from acclimate.llm.decode.loop import step_kind

PROMPT = torch.arange(3, 12)[None]
LONG = {"max_position_embeddings": 512}
Change = Callable[[Any], Any]


@functools.cache
def made(name: str) -> Any:
    return tiny_model(name, num_hidden_layers=1)


def text(model: Any, prompt: Tensor = PROMPT, **options: Any) -> Tensor:
    tokens: Tensor = model.generate(prompt, **{"do_sample": False, "max_new_tokens": 30, **options})
    return tokens


@functools.cache
def text_of_unchanged_llama() -> Tensor:
    return text(made("llama"))


@functools.cache
def pair() -> tuple[Any, Any]:
    """A tiny Llama, and the same one from ``init_inference``; tests change neither."""
    own = copy.deepcopy(made("llama"))
    return own, acclimate.init_inference(copy.deepcopy(own))


def mlp(model: Any) -> Any:
    return model.model.layers[0].mlp


def derive(module: nn.Module, **methods: Any) -> None:
    """Gives a module a class of its own, derived from its class."""
    module.__class__ = type("Derived", (type(module),), methods)


def forward_of(module: nn.Module, change: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    """Gives a module a class whose forward changes the result of the module's own."""
    own: Any = type(module)
    derive(module, forward=lambda self, x: change(self, x, own.forward(self, x)))


def counted(module: Any, _: Tensor, result: Tensor) -> Tensor:
    module.calls = getattr(module, "calls", 0) + 1
    return result * (1.5 if module.calls > 12 else 1)


def listed(module: Any, _: Tensor, result: Tensor) -> Tensor:
    module.seen.append(1)
    return result * (1.5 if len(module.seen) > 12 else 1)


def buffered(module: Any, _: Tensor, result: Tensor) -> Tensor:
    module.total = module.total + 1
    return result * (1 + module.total / 20)


def written_by_prompts(module: Any, x: Tensor, result: Tensor) -> Tensor:
    if x.shape[1] > 1:
        module.total.copy_(x[-1, -1])
    return result + module.total


def written_after_it_is_read(module: Any, x: Tensor, result: Tensor) -> Tensor:
    found = result + module.total
    module.total.copy_(x[-1, -1])
    return found


def written_through_a_view(module: Any, x: Tensor, result: Tensor) -> Tensor:
    module.total[:].copy_(x[-1, -1])
    return result + module.total


def otherwise_at_first(module: Any, _: Tensor, result: Tensor) -> Tensor:
    is_first = not hasattr(module, "called")
    module.called = True
    return result * (1.5 if is_first else 1)


def by_chance(_: Any, __: Tensor, result: Tensor) -> Tensor:
    return result if random.random() < 2 else -result


def with_attribute(name: str, value: Any, change: Any) -> Change:
    def apply(model: Any) -> None:
        if isinstance(value, Tensor):
            mlp(model).register_buffer(name, value.clone())
        else:
            setattr(mlp(model), name, copy.copy(value))
        forward_of(mlp(model), change)

    return apply


def on_mlp(change: Any) -> Change:
    return lambda model: forward_of(mlp(model), change)


def on_up(change: Any) -> Change:
    return lambda model: forward_of(mlp(model).up_proj, change)


def on_head(change: Any) -> Change:
    return lambda model: forward_of(model.lm_head, change)


def far_position(model: Any) -> None:
    layer = model.model.layers[0]
    own: Any = type(layer)

    def forward(self: Any, hidden: Tensor, **others: Any) -> Any:
        return own.forward(self, hidden, **others) + 2.0 * (others["position_ids"][..., None] > 25)

    derive(layer, forward=forward)


def on_layer(is_far: Callable[[Any, Tensor, Any], bool]) -> Change:
    """Lets the layer add to its result where a function of it, its input and the cache says so."""

    def apply(model: Any) -> None:
        layer = model.model.layers[0]
        own: Any = type(layer)

        def forward(self: Any, hidden: Tensor, **others: Any) -> Any:
            found = own.forward(self, hidden, **others)
            return found + 2.0 if is_far(self.self_attn.config, hidden, others["past_key_values"]) else found

        derive(layer, forward=forward)

    return apply


def asks_for_attention(config: Any, _: Tensor, cache: Any) -> bool:
    return config._attn_implementation in ("sdpa", "flash_attention_2") and cache.get_seq_length() > 25


def asks_for_a_kind_of_cache(_: Any, __: Tensor, cache: Any) -> bool:
    return isinstance(cache, DynamicCache) and cache.get_seq_length() > 25


def reads_the_keys(_: Any, __: Tensor, cache: Any) -> bool:
    keys = cache.layers[0].keys
    return keys is not None and keys.shape[2] > 25


def asks_whether_keys_are_there(_: Any, __: Tensor, cache: Any) -> bool:
    return cache.is_initialized and cache.layers[0].keys.shape[2] > 25


def counts_in_the_configuration(config: Any, _: Tensor, __: Any) -> bool:
    config.calls = getattr(config, "calls", 0) + 1
    return config.calls > 25


def catches_a_refusal(_: Any, hidden: Tensor, __: Any) -> bool:
    try:
        return float(hidden.abs().max()) > 1.6
    except Exception:
        return False


def frequencies_under_another_name(model: Any) -> None:
    rotations = model.model.rotary_emb
    own: Any = type(rotations)
    rotations.register_buffer("same", rotations.inv_freq.detach())
    rotations.register_buffer("others", rotations.inv_freq * 3)

    def forward(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        self.same.copy_(self.others)
        return own.forward(self, x, position_ids)

    derive(rotations, forward=forward)


def one_token(model: Any) -> None:
    own: Any = type(model)

    def forward(self: Any, input_ids: Tensor, **others: Any) -> Any:
        found = own.forward(self, input_ids, **others)
        if bool((input_ids == 7).any()):
            found.logits = found.logits.flip(-1)
        return found

    derive(model, forward=forward)


BEFORE: dict[str, Change] = {
    "a_limit_of_a_linear_module_beyond_common_values": on_up(lambda m, x, y: y.clamp(max=4.5)),
    "a_limit_of_the_logits_beyond_common_values": on_head(lambda m, x, y: y.clamp(max=5.0)),
    "a_linear_module_that_adds_for_long_prompts": on_up(lambda m, x, y: y + 1 if x.shape[1] > 8 else y),
    "a_linear_module_that_looks_at_its_width": on_up(lambda m, x, y: y + 1 if x.shape[-1] > 50 else y),
    "a_linear_module_that_looks_at_values": on_up(lambda m, x, y: -y if float(x.min()) < -1 else y),
    "a_linear_module_that_counts_calls": on_up(counted),
    "a_linear_module_with_a_call_of_its_own": lambda model: derive(
        mlp(model).up_proj, __call__=lambda self, x: nn.Linear.forward(self, x).clamp(-2, 2)
    ),
    "an_mlp_that_counts_calls": on_mlp(counted),
    "an_mlp_that_keeps_a_list": with_attribute("seen", [], listed),
    "an_mlp_that_replaces_a_buffer": with_attribute("total", torch.zeros(()), buffered),
    "an_mlp_that_writes_to_a_buffer_in_prompts": with_attribute("total", torch.zeros(64), written_by_prompts),
    "an_mlp_that_reads_a_buffer_before_it_writes_to_it": with_attribute(
        "total", torch.zeros(64), written_after_it_is_read
    ),
    "an_mlp_that_writes_to_a_buffer_through_a_view": with_attribute(
        "total", torch.zeros(64), written_through_a_view
    ),
    "an_mlp_whose_first_call_differs": on_mlp(otherwise_at_first),
    "an_mlp_that_draws_numbers_of_python": on_mlp(by_chance),
    "an_mlp_that_mixes_sequences": on_mlp(lambda m, x, y: y - y.mean(0, keepdim=True) / 2),
    "an_mlp_that_sums_over_tokens": on_mlp(lambda m, x, y: y + y.cumsum(1) / 10),
    "an_mlp_that_changes_its_result_in_place": on_mlp(lambda m, x, y: y.add_(0.2)),
    "an_mlp_that_limits_its_result": on_mlp(lambda m, x, y: y.clamp(-3, 3)),
    "a_layer_that_adds_at_far_positions": far_position,
    "a_layer_that_asks_how_attention_is_computed": on_layer(asks_for_attention),
    "a_layer_that_asks_for_a_kind_of_cache": on_layer(asks_for_a_kind_of_cache),
    "a_layer_that_reads_the_keys_of_the_cache": on_layer(reads_the_keys),
    "a_layer_that_asks_whether_there_are_keys": on_layer(asks_whether_keys_are_there),
    "a_layer_that_counts_in_the_configuration": on_layer(counts_in_the_configuration),
    "a_layer_that_catches_the_error_of_a_question": on_layer(catches_a_refusal),
    "rotations_that_write_their_frequencies_through_another_buffer": frequencies_under_another_name,
    "a_model_that_looks_for_a_token": one_token,
    "a_bias_of_the_logits": on_head(lambda m, x, y: y + torch.arange(160) * 0.01),
    "an_activation_with_a_far_limit": lambda model: setattr(mlp(model), "act_fn", nn.ReLU6()),
}
"""Changes before ``init_inference``."""


@pytest.mark.parametrize(
    "change",
    quick(
        BEFORE,
        "a_linear_module_that_adds_for_long_prompts",
        "a_layer_that_adds_at_far_positions",
        "a_layer_that_reads_the_keys_of_the_cache",
    ),
)
def test_code_that_does_something_more_is_computed(change: Change) -> None:
    model = copy.deepcopy(made("llama"))
    change(model)
    own, ours = copy.deepcopy(model), acclimate.init_inference(model)
    state = random.getstate()
    expected = text(own)
    random.setstate(state)
    assert torch.equal(text(ours), expected)
    with torch.no_grad():  # values beyond the limits
        for net in (own, ours):
            net.model.norm.weight.mul_(3)
            mlp(net).up_proj.weight.mul_(3)
    assert torch.equal(text(ours, max_new_tokens=10), text(own, max_new_tokens=10))


@pytest.mark.slow
def test_a_linear_module_of_gpt2_with_a_limit_is_computed() -> None:
    model = copy.deepcopy(made("gpt2"))
    forward_of(model.transformer.h[0].mlp.c_fc, lambda m, x, y: y.clamp(max=1.5))
    own, ours = copy.deepcopy(model), acclimate.init_inference(model)
    assert torch.equal(text(ours), text(own))


def test_linear_modules_with_a_forward_of_their_own_still_step_in_native_code() -> None:
    assert step_kind(acclimate.init_inference(copy.deepcopy(made("gpt2")))) == "native"


def negative(tensor: Tensor) -> None:
    tensor.detach().numpy()[...] *= -1


class LowRank(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Parameter(torch.full((2, inner.in_features), 0.1))
        self.up = nn.Parameter(torch.full((inner.out_features, 2), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + functional.linear(functional.linear(x, self.down), self.up)


def set_class_with(**methods: Any) -> Change:
    return lambda model: derive(mlp(model), **methods)


AFTER: dict[str, Change] = {
    "a_class_of_an_mlp": on_mlp(lambda m, x, y: y * 2),
    "a_class_of_a_linear_module": on_up(lambda m, x, y: y.clamp(max=1)),
    "a_class_with_a_call_of_its_own": set_class_with(__call__=lambda self, x: x * 2),
    "a_class_without_hooks": set_class_with(_call_impl=lambda self, x: x),
    "a_class_of_the_model": one_token,
    "a_hook": lambda model: mlp(model).register_forward_hook(lambda m, given, result: result * 2),
    "a_hook_of_the_head": lambda model: model.lm_head.register_forward_hook(lambda m, given, result: -result),
    "a_forward_of_one_module": lambda model: setattr(mlp(model), "forward", torch.neg),
    "an_activation": lambda model: setattr(mlp(model), "act_fn", nn.ReLU()),
    "a_scale_of_attention": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 2.0),
    "an_epsilon": lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 5.0),
    "a_scale_of_rotations": lambda model: setattr(model.model.rotary_emb, "attention_scaling", 2.0),
    "frequencies": lambda model: model.model.rotary_emb.inv_freq.data.mul_(0.3),
    "a_norm_through_numpy": lambda model: negative(model.model.layers[0].input_layernorm.weight),
    "the_head_through_numpy": lambda model: negative(model.lm_head.weight),
    "a_weight_through_data": lambda model: mlp(model).up_proj.weight.data.mul_(-1),
    "a_bias_that_was_missing": lambda model: setattr(
        mlp(model).up_proj, "bias", nn.Parameter(torch.ones(128))
    ),
    "a_wrapped_linear_module": lambda model: setattr(mlp(model), "up_proj", LowRank(mlp(model).up_proj)),
    "a_removed_mlp": lambda model: setattr(model.model.layers[0], "mlp", nn.Identity()),
    "the_embedding_as_head": lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight),
}
"""Changes after a text."""


@pytest.mark.parametrize(
    "change",
    quick(
        AFTER,
        "a_hook",
        "a_norm_through_numpy",
    ),
)
def test_a_later_change_counts(change: Change) -> None:
    own = copy.deepcopy(made("llama"))
    ours = acclimate.init_inference(copy.deepcopy(own))
    before = text_of_unchanged_llama()
    assert torch.equal(text(ours), before)
    assert step_kind(ours) == "native"
    for net in (own, ours):
        change(net)
    expected = text(own)
    assert torch.equal(text(ours), expected)
    assert not torch.equal(expected, before), "the change changes nothing"


def test_a_bias_that_is_a_buffer_counts() -> None:
    own = copy.deepcopy(made("llama"))
    del mlp(own).up_proj.bias
    mlp(own).up_proj.register_buffer("bias", torch.zeros(128))
    ours = acclimate.init_inference(copy.deepcopy(own))
    before = text(ours)
    assert torch.equal(before, text(own))
    assert step_kind(ours) == "native"
    for net in (own, ours):
        mlp(net).up_proj.bias.add_(0.5)
    assert torch.equal(text(ours), text(own))
    assert not torch.equal(text(ours), before)


class Larger(TorchFunctionMode):
    """Multiplies the results of linear modules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 1.3 if func is functional.linear else result


def replaced(owner: Any, name: str, change: Callable[[Any], Any]) -> Callable[[], Any]:
    """Returns what replaces a function by one made of it."""
    return lambda: patch.object(owner, name, change(getattr(owner, name)))


def attention(original: Any) -> Any:
    """Returns attention that differs for long texts."""

    def changed(query: Tensor, key: Tensor, *others: Any, **named: Any) -> Tensor:
        found: Tensor = original(query, key, *others, **named)
        return found * (1.5 if key.shape[2] > 20 else 1)

    return changed


def registered_attention(module: Any, query: Tensor, key: Tensor, *others: Any, **named: Any) -> Any:
    result, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, *others, **named)
    return result * (1.5 if key.shape[2] > 20 else 1), weights


@contextlib.contextmanager
def global_hook() -> Iterator[None]:
    def double(module: nn.Module, given: Any, result: Any) -> Any:
        return result * 2 if isinstance(module, modeling_llama.LlamaMLP) else None

    hook = nn.modules.module.register_module_forward_hook(double)
    try:
        yield
    finally:
        hook.remove()


AROUND: dict[str, Callable[[], Any]] = {
    "linear": replaced(functional, "linear", lambda own: lambda x, w, b=None: own(x, w, b).clamp(max=2)),
    "forward_of_linear": replaced(nn.Linear, "forward", lambda own: lambda m, x: own(m, x).clamp(max=2)),
    "attention": replaced(functional, "scaled_dot_product_attention", attention),
    "silu": replaced(functional, "silu", lambda own: lambda x, inplace=False: torch.tanh(x)),
    "embedding": replaced(functional, "embedding", lambda own: lambda *a, **k: own(*a, **k) + 0.1),
    "rsqrt": replaced(torch, "rsqrt", lambda own: lambda x: own(x).clamp(max=0.7)),
    "cos": replaced(Tensor, "cos", lambda own: lambda x: x * 0 + 0.5),
    "pow": replaced(Tensor, "pow", lambda own: lambda x, power: x.abs()),
    "rotation": replaced(modeling_llama, "rotate_half", lambda own: lambda x: x),
    "forward_of_mlp": replaced(modeling_llama.LlamaMLP, "forward", lambda own: lambda m, x: -own(m, x)),
    "cache": replaced(DynamicCache, "update", lambda own: lambda c, k, v, *a, **n: own(c, k, v * 2, *a, **n)),
    "function_mode": Larger,
    "global_hook": global_hook,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
"""Changes outside the model that hold for one text."""


@pytest.mark.parametrize("around", quick(AROUND, "linear", "autocast"))
def test_a_change_outside_the_model_counts_while_it_holds(around: Callable[[], Any]) -> None:
    own, ours = pair()
    before = text_of_unchanged_llama()
    assert torch.equal(text(ours), before)
    assert step_kind(ours) == "native"
    with around():
        expected, found = text(own), text(ours)
    assert torch.equal(found, expected)
    assert torch.equal(text(ours), before)


def test_attention_that_a_decorator_names_as_transformers_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sdpa: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]

    @functools.wraps(sdpa)
    def function(module: Any, query: Tensor, key: Tensor, *others: Any, **named: Any) -> Any:
        result, weights = sdpa(module, query, key, *others, **named)
        return (result.flip(-1) if key.shape[2] > 25 else result), weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", function)
    own = copy.deepcopy(made("llama"))
    ours = acclimate.init_inference(copy.deepcopy(own))
    assert torch.equal(text(ours), text(own))


def test_code_that_asks_for_eager_attention_still_steps_in_native_code() -> None:
    model = copy.deepcopy(made("llama"))
    on_layer(lambda config, hidden, cache: config._attn_implementation == "eager")(model)
    assert step_kind(acclimate.init_inference(model)) == "native"


def test_attention_of_another_package_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    for registry, function in (
        (ALL_ATTENTION_FUNCTIONS, registered_attention),
        (ALL_MASK_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]),
    ):
        monkeypatch.setitem(registry._global_mapping, "differs_for_long_texts", function)
    own = copy.deepcopy(made("llama"))
    own.set_attn_implementation("differs_for_long_texts")
    ours = acclimate.init_inference(copy.deepcopy(own))
    assert torch.equal(text(ours), text(own))


def hole() -> Tensor:
    mask = torch.ones_like(PROMPT)
    mask[0, 4] = 0
    return mask


ARGUMENTS: dict[str, dict[str, Any]] = {
    "a_mask_with_a_hole": {"attention_mask": hole()},
    "a_mask_that_begins_with_halves": {
        "attention_mask": torch.ones(1, 9).index_fill(1, torch.arange(3), 0.5)
    },
    "a_mask_without_the_last_token": {"attention_mask": (torch.arange(9) < 8)[None].long()},
    "a_mask_of_other_numbers": {"attention_mask": torch.full_like(PROMPT, 2)},
    "later_positions": {"position_ids": torch.arange(9)[None] + 5},
    "positions_in_reverse": {"position_ids": torch.arange(9).flip(0)[None]},
    "a_static_cache": {"cache_implementation": "static"},
    "no_cache": {"use_cache": False},
    "a_given_prefix": {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(20, 60))},
    "beams": {"num_beams": 3},
    "guidance": {"guidance_scale": 1.7},
    "parts_of_a_prompt": {"prefill_chunk_size": 4},
    "tokens_from_the_prompt": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize(
    "options",
    quick(
        ARGUMENTS, "a_mask_with_a_hole", "later_positions", "a_static_cache", "beams", "parts_of_a_prompt",
    ),
)  # fmt: skip
def test_unusual_arguments_count(options: dict[str, Any]) -> None:
    own, ours = pair()
    assert torch.equal(text(ours, **options), text(own, **options))


def rotations(kind: str, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4, "rope_type": kind, "factor": 4.0, **others}}


LENGTHS: dict[str, tuple[str, dict[str, Any]]] = {
    "angles_that_follow_the_length": ("llama", {"max_position_embeddings": 32, **rotations("dynamic")}),
    "yarn": ("llama", LONG | rotations("yarn", original_max_position_embeddings=16)),
    "two_sets_of_factors": (
        "phi3",
        {
            "max_position_embeddings": 256, "original_max_position_embeddings": 32,
            **rotations("longrope", short_factor=[1.0] * 8, long_factor=[3.0] * 8,
                        original_max_position_embeddings=32),
        },
    ),
    "queries_scaled_by_position": (
        "ministral3",
        LONG | rotations("yarn", original_max_position_embeddings=16, llama_4_scaling_beta=2.0,
                         beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
    ),
    "windows": ("gemma2", {"sliding_window": 7, "attn_logit_softcapping": 0.5, **LONG}),
    "distances": ("bloom", {}),
    "learned_positions": ("gpt2", {}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "values"), LENGTHS.values(), ids=LENGTHS.keys())
def test_far_positions_count(name: str, values: dict[str, Any]) -> None:
    own = tiny_model(name, **values)
    ours = acclimate.init_inference(copy.deepcopy(own))
    assert torch.equal(text(ours, max_new_tokens=70), text(own, max_new_tokens=70))


_CALLS: dict[str, int] = {}


class _CountsElsewhere(nn.Module):
    """Keeps a number outside of itself, and computes something else after 30 calls."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: torch.Tensor) -> Any:
        _CALLS["all"] = _CALLS.get("all", 0) + 1
        return self.own(x) * (1.5 if _CALLS["all"] > 30 else 1.0)


def test_a_number_that_code_keeps_outside_of_the_model_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp = _CountsElsewhere(model.model.layers[1].mlp)
    assert step_kind(acclimate.init_inference(model)) == "transformers"


def test_a_change_by_a_callback_within_a_text_is_an_error_and_one_of_a_norm_counts() -> None:
    ours = acclimate.init_inference(tiny_model("llama"))
    plain = tiny_model("llama")
    prompt = torch.arange(3, 12)[None]

    def written(model: Any) -> Any:
        def write(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == 14:
                model.model.norm.weight.data.mul_(-1.0)
            return scores

        return [write]

    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16}
    expected = plain.generate(prompt, logits_processor=written(plain), **options)
    assert torch.equal(ours.generate(prompt, logits_processor=written(ours), **options), expected)

    def replaced(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ours.model.layers[0].mlp.act_fn = nn.ReLU()
        return scores

    with pytest.raises(ModelChangedError, match="was changed while it generated"):
        ours.generate(prompt, logits_processor=[replaced], **options)


def test_a_users_function_in_an_object_of_transformers_cannot_change_a_model_unseen() -> None:
    ours = acclimate.init_inference(copy.deepcopy(made("llama")))

    def allowed(batch: int, ids: Tensor) -> list[int]:
        if len(ids) == 14:
            mlp(ours).act_fn = nn.ReLU()
        return list(range(160))

    with pytest.raises(ModelChangedError, match="was changed while it generated"):
        text(ours, prefix_allowed_tokens_fn=allowed)


def test_frequencies_that_change_within_a_text_are_an_error() -> None:
    ours = acclimate.init_inference(copy.deepcopy(made("llama")))

    def changed(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == 14:
            ours.model.rotary_emb.inv_freq.mul_(0.3)
        return scores

    with pytest.raises(ModelChangedError, match="was changed while it generated"):
        text(ours, logits_processor=[changed])


class _Callback(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, act: Callable[[Tensor], object]) -> None:
        self.act = act

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.act(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class _WithAnEnd(_Callback):
    eos_token_id = 7


class _Streamer:
    def put(self, tokens: Tensor) -> None:
        tokens.fill_(3)

    def end(self) -> None:
        pass


def _every_third_is_7(ids: Tensor) -> None:
    if ids.shape[1] % 3 == 0:
        ids[:, -1] = 7


CALLBACKS: dict[str, dict[str, Any]] = {
    "a_criterion_that_changes_tokens": {"stopping_criteria": [_Callback(_every_third_is_7)]},
    "a_criterion_that_views_tokens": {"stopping_criteria": [_Callback(lambda ids: ids.view(-1))]},
    "a_criterion_with_an_end_of_its_own": {"stopping_criteria": [_WithAnEnd(len)]},
}


@pytest.mark.parametrize("options", CALLBACKS.values(), ids=CALLBACKS.keys())
def test_callbacks_get_the_tokens_as_transformers_gives_them(options: dict[str, Any]) -> None:
    own, ours = pair()
    prompt = torch.cat((PROMPT, PROMPT + 20))
    assert torch.equal(text(ours, prompt, **options), text(own, prompt, **options))


def test_a_streamer_that_changes_its_tokens_changes_no_text() -> None:
    own, ours = pair()
    assert torch.equal(text(ours, streamer=_Streamer()), text(own, streamer=_Streamer()))
