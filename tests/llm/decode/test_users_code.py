"""The user's own code in a model: whatever it reads counts, or the model is left to transformers.

Each case changes a plain copy of the model in the same way, and expects its tokens.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import tiny_model

import acclimate
from acclimate.llm.decode.loop import step_kind
from quick_parameters import quick

PROMPT = torch.arange(3, 12)[None]


@functools.cache
def made() -> Any:
    return tiny_model("llama", num_hidden_layers=1)


def text(model: Any, prompt: Tensor = PROMPT) -> Tensor:
    tokens: Tensor = model.generate(prompt, do_sample=False, max_new_tokens=20)
    return tokens


def with_mlp(kind: Any) -> Any:
    """Returns a model whose MLP is in a module of a class of the user's."""
    model = copy.deepcopy(made())
    model.model.layers[0].mlp = kind(model.model.layers[0].mlp)
    return model


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.begin()

    def begin(self) -> None:
        pass


# -- code that counts its calls ------------------------------------------------------------------------------

_CALLS = 0


def later(calls: int) -> float:
    return 1.5 if calls > 12 else 1.0


class OfItsFile(Around):
    def forward(self, x: Tensor) -> Any:
        global _CALLS
        _CALLS += 1
        return self.inner(x) * later(_CALLS)


def _enclosed() -> Any:
    calls = 0

    def forward(self: Any, x: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return self.inner(x) * later(calls)

    return forward


class Enclosed(Around):
    forward = _enclosed()


class OfItsClass(Around):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        type(self).calls += 1
        return self.inner(x) * later(self.calls)


class OfAnIterator(Around):
    def begin(self) -> None:
        self.calls = itertools.count()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * later(next(self.calls))


class OfAnObject(Around):
    def begin(self) -> None:
        self.state = types.SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Any:
        self.state.calls += 1
        return self.inner(x) * later(self.state.calls)


class OfAListInADictionary(Around):
    def begin(self) -> None:
        self.state = {"calls": [0]}

    def forward(self, x: Tensor) -> Any:
        self.state["calls"][0] += 1
        return self.inner(x) * later(self.state["calls"][0])


class OfADeque(Around):
    def begin(self) -> None:
        self.state: Any = collections.deque()

    def forward(self, x: Tensor) -> Any:
        self.state.append(1)
        return self.inner(x) * later(len(self.state))


class OfAnArray(Around):
    def begin(self) -> None:
        self.state = np.zeros(1)

    def forward(self, x: Tensor) -> Any:
        self.state[0] += 1
        return self.inner(x) * later(int(self.state[0]))


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * later(self.calls)


_COUNTING = Counting()


class OfACalledObject(Around):
    def forward(self, x: Tensor) -> Any:
        return _COUNTING(self.inner(x))


class OfACalledAttribute(Around):
    def begin(self) -> None:
        self.call = Counting()

    def forward(self, x: Tensor) -> Any:
        return self.call(self.inner(x))


@functools.lru_cache
def ones(count: int) -> Tensor:
    return torch.ones(count)


class OfACache(Around):
    def forward(self, x: Tensor) -> Any:
        return self.inner(x * ones(x.shape[-1]))


COUNTERS = [
    OfItsFile, Enclosed, OfItsClass, OfAnIterator, OfAnObject, OfAListInADictionary, OfADeque, OfAnArray,
    OfACalledObject, OfACalledAttribute, OfACache,
]  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    quick(
        {kind.__name__: kind for kind in COUNTERS},
        "OfItsFile",
        "Enclosed",
        "OfAnObject",
        "OfACalledAttribute",
    ),
)
def test_code_that_keeps_a_number_is_left_to_transformers(kind: Any) -> None:
    ours = acclimate.init_inference(with_mlp(kind))
    assert step_kind(ours) == "transformers"
    text(ours)


# -- values that code reads elsewhere -----------------------------------------------------------------------

STATE = {"scale": 1.0}
SCALE = 1.0
SETTINGS = types.ModuleType("settings_of_a_user")
exec("SCALE = 1.0\ndef scaled(x): return x * SCALE", vars(SETTINGS))


class Settings:
    scale = 1.0


def scaled(x: Tensor) -> Tensor:
    return x * STATE["scale"]


class InADecoratedFunction(Around):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * STATE["scale"]


class InAFunctionOfItsFile(Around):
    def forward(self, x: Tensor) -> Any:
        return scaled(self.inner(x))


class InAStaticFunction(Around):
    @staticmethod
    def scale() -> float:
        return STATE["scale"]

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * self.scale()


class InAProperty(Around):
    @property
    def scale(self) -> float:
        return STATE["scale"]

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * self.scale


class InAComprehension(Around):
    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * sum([STATE["scale"] for _ in range(1)])


class InAFunctionThatIsAnAttribute(Around):
    def begin(self) -> None:
        self.scaled = lambda x: x * STATE["scale"]

    def forward(self, x: Tensor) -> Any:
        return self.scaled(self.inner(x))


class InAllVariables(Around):
    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * globals()["STATE"]["scale"]


class InAnotherFile(Around):
    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * SETTINGS.SCALE


class InAFunctionOfAnotherFile(Around):
    def forward(self, x: Tensor) -> Any:
        return SETTINGS.scaled(self.inner(x))


class InAnotherClass(Around):
    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * Settings.scale


class InAListOfItsClass(Around):
    scales = [1.0]  # noqa: RUF012 - that is the case

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * self.scales[0]


class InAnObject(Around):
    def begin(self) -> None:
        self.settings = types.SimpleNamespace(scale=1.0)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * self.settings.scale


class InAnArray(Around):
    def begin(self) -> None:
        self.scales = np.ones(1)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * float(self.scales[0])


class InADictionaryOfADictionary(Around):
    def begin(self) -> None:
        self.settings = {"mlp": {"scale": 1.0}}

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * self.settings["mlp"]["scale"]


class InAnEnclosedList(Around):
    def begin(self) -> None:
        self.box = box = [1.0]
        self.scaled = lambda x: x * box[0]

    def forward(self, x: Tensor) -> Any:
        return self.scaled(self.inner(x))


class InAHiddenModule(Around):
    def begin(self) -> None:
        self.hidden = [nn.LayerNorm(64, elementwise_affine=False)]

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.hidden[0](x))


def set_state(_: Any, value: float) -> None:
    STATE["scale"] = value


def set_in(owner: Any, name: str) -> Callable[[Any, float], None]:
    return lambda mlp, value: setattr(owner, name, value)


ELSEWHERE: list[tuple[Any, Callable[[Any, float], None]]] = [
    (InADecoratedFunction, set_state),
    (InAFunctionOfItsFile, set_state),
    (InAStaticFunction, set_state),
    (InAProperty, set_state),
    (InAComprehension, set_state),
    (InAFunctionThatIsAnAttribute, set_state),
    (InAllVariables, set_state),
    (InAnotherFile, set_in(SETTINGS, "SCALE")),
    (InAFunctionOfAnotherFile, set_in(SETTINGS, "SCALE")),
    (InAnotherClass, set_in(Settings, "scale")),
    (InAListOfItsClass, lambda mlp, value: InAListOfItsClass.scales.__setitem__(0, value)),
    (InAnObject, lambda mlp, value: setattr(mlp.settings, "scale", value)),
    (InAnArray, lambda mlp, value: mlp.scales.fill(value)),
    (InADictionaryOfADictionary, lambda mlp, value: mlp.settings["mlp"].update(scale=value)),
    (InAnEnclosedList, lambda mlp, value: mlp.box.__setitem__(0, value)),
    (InAHiddenModule, lambda mlp, value: setattr(mlp.hidden[0], "eps", value - 1.0 + 1e-5)),
]


@pytest.mark.parametrize(
    "case",
    quick(
        {case[0].__name__: case for case in ELSEWHERE},
        "InAnotherFile",
        "InAHiddenModule",
    ),
)
def test_a_value_that_code_reads_elsewhere_counts_when_it_changes(
    case: tuple[Any, Callable[[Any, float], None]],
) -> None:
    kind, change = case
    own = with_mlp(kind)
    ours = acclimate.init_inference(copy.deepcopy(own))
    mlps = [model.model.layers[0].mlp for model in (own, ours)]
    try:
        before = text(own)
        assert torch.equal(text(ours), before)
        for mlp in mlps:
            change(mlp, 2.5)
        expected = text(own)
        assert torch.equal(text(ours), expected)
        assert not torch.equal(expected, before), "the change changes nothing"
    finally:
        for mlp in mlps:
            change(mlp, 1.0)


class OfNumbers(Around):
    def begin(self) -> None:
        self.factors, self.times = (1.0, 0.5), functools.partial(torch.mul)

    def forward(self, x: Tensor) -> Any:
        return self.times(self.inner(x), SCALE * Settings.scale * SETTINGS.SCALE * self.factors[1])


def test_code_that_reads_numbers_and_functions_steps_in_native_code() -> None:
    own = with_mlp(OfNumbers)
    ours = acclimate.init_inference(copy.deepcopy(own))
    assert step_kind(ours) == "native"
    assert torch.equal(text(ours), text(own))


# -- other code that a capture must not overlook ------------------------------------------------------------


class ForOneSequence(Around):
    def forward(self, x: Tensor) -> Any:
        found: Any = self.inner(x)
        return -found if len(x) == 1 else found


class WithoutTheDimensionOfSequences(Around):
    def forward(self, x: Tensor) -> Any:
        found: Any = self.inner(x)
        return found * found.squeeze(0).dim()


@pytest.mark.parametrize(
    ("sequences", "kind"),
    [
        (1, ForOneSequence),
        pytest.param(2, WithoutTheDimensionOfSequences, marks=pytest.mark.slow),
        pytest.param(2, ForOneSequence, marks=pytest.mark.slow),
        pytest.param(1, WithoutTheDimensionOfSequences, marks=pytest.mark.slow),
    ],
)
def test_code_that_treats_one_sequence_differently_is_computed(kind: Any, sequences: int) -> None:
    own = with_mlp(kind)
    ours = acclimate.init_inference(copy.deepcopy(own))
    prompt = PROMPT.repeat(sequences, 1)
    assert torch.equal(text(ours, prompt), text(own, prompt))


@torch.library.custom_op("tests_of_acclimate::silu", mutates_args=())
def limited_silu(x: Tensor) -> Tensor:
    return nn.functional.silu(x).clamp(max=8.0)


@limited_silu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class LimitedSiLU(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.ops.tests_of_acclimate.silu(x)


def larger(model: Any) -> None:
    with torch.no_grad():
        for module in (model.model.layers[0].mlp.gate_proj, model.model.layers[0].mlp.up_proj):
            module.weight.mul_(16.0)


class LimitedLinear(Tensor):
    """A weight whose products are limited."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found.as_subclass(Tensor).clamp(max=6.0) if func is nn.functional.linear else found


def _with_limited_weight(model: Any) -> None:
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(LimitedLinear))


class LinearWithAShift(nn.Linear):
    shift: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight, self.bias) + self.shift


def _with_shift(model: Any) -> None:
    linear = model.model.layers[0].mlp.up_proj
    linear.__class__ = LinearWithAShift
    linear.register_buffer("shift", torch.zeros(()))


class LinearOfAProperty(nn.Linear):
    @property
    def weight(self) -> Tensor:
        return self._parameters["weight"] * 1.5  # type: ignore[operator]


def _with_property(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.__class__ = LinearOfAProperty


class AddsTwice(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm, self.bias = norm, nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.norm(x), self.bias, alpha=2)


def _adding_twice(model: Any) -> None:
    model.model.norm = AddsTwice(model.model.norm)


def _embedding_multiplied(model: Any) -> None:
    model.model.embed_tokens.__class__ = type(
        "Multiplied",
        (nn.Embedding,),
        {"forward": lambda self, tokens: nn.Embedding.forward(self, tokens) * self.factor},
    )
    model.model.embed_tokens.register_buffer("factor", torch.tensor(1.5))


def _replace_by_an_equal_factor(model: Any) -> None:
    model.model.embed_tokens.factor = model.model.embed_tokens.factor.clone()


OVERLOOKED: dict[str, tuple[Callable[[Any], None], list[Callable[[Any], None]]]] = {
    "an_operator_with_a_name_of_torchs": (
        lambda model: setattr(model.model.layers[0].mlp, "act_fn", LimitedSiLU()), [larger],
    ),
    "a_weight_of_a_class_of_its_own": (_with_limited_weight, [larger]),
    "a_linear_module_with_a_shift": (
        _with_shift, [lambda model: model.model.layers[0].mlp.up_proj.shift.fill_(2.0)],
    ),
    "a_linear_module_with_a_property": (
        _with_property,
        [lambda model: model.model.layers[0].mlp.up_proj._parameters["weight"].data.mul_(-1.0)],
    ),
    "a_bias_that_is_added_twice": (_adding_twice, [lambda model: model.model.norm.bias.data.normal_()]),
    "a_number_in_a_tensor_that_is_replaced": (
        _embedding_multiplied,
        [_replace_by_an_equal_factor, lambda model: model.model.embed_tokens.factor.fill_(-3.0)],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    quick(
        tuple(OVERLOOKED), "an_operator_with_a_name_of_torchs", "a_weight_of_a_class_of_its_own",
    ),
)  # fmt: skip
def test_what_a_program_does_besides_is_computed(name: str) -> None:
    before, changes = OVERLOOKED[name]
    models = []
    for _ in range(2):
        model = copy.deepcopy(made())
        before(model)
        models.append(model)
    own, ours = models[0], acclimate.init_inference(models[1])
    assert torch.equal(text(ours), text(own))
    for change in changes:
        for model in (own, ours):
            torch.manual_seed(0)
            change(model)
        assert torch.equal(text(ours), text(own))


def _first_token_only(self: Any, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
    return input_ids[:, :1]


def test_a_loop_of_the_users_writes_the_text() -> None:
    model = copy.deepcopy(made())
    model.__class__ = type("WithALoop", (type(model),), {"_sample": _first_token_only})
    assert text(acclimate.init_inference(model)).tolist() == [[3]]


def test_attention_without_a_causal_mask_reads_a_prompt_as_transformers_does() -> None:
    own = copy.deepcopy(made()).to(torch.bfloat16)
    for layer in own.model.layers:
        layer.self_attn.is_causal = False
    ours = acclimate.init_inference(copy.deepcopy(own))
    assert torch.equal(text(ours), text(own))


def test_a_function_put_into_a_class_of_transformers_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = type(made().model.layers[0].mlp)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: own(self, x) * STATE["scale"])
    plain, ours = copy.deepcopy(made()), acclimate.init_inference(copy.deepcopy(made()))
    assert torch.equal(text(ours), text(plain))
    monkeypatch.setitem(STATE, "scale", 3.0)
    assert torch.equal(text(ours), text(plain))
