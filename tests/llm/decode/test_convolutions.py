"""Models with gated short convolutions take the step, and write transformers' text."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from quick_parameters import quick

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import tiny_model
from changed_weights import changed
from gguf_files import make_model, write_gguf
from mixer_texts import (
    ALWAYS,
    PROMPT,
    check_callers_cache,
    check_graph,
    lean_of,
    logits_of_steps,
    random_text,
    text_of_a_thread,
    texts,
)
from padded_prompts import padded_batch
from test_batching import at_once
from transformers import DynamicCache
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

import acclimate
from acclimate.llm.decode import cache, loop, native, proof
from acclimate.llm.decode.description import Convolution
from acclimate.llm.decode.lean import LeanDecoder
from acclimate.llm.decode.loop import step_kind

TYPES = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {}),
    "attention first, a wide convolution": (
        "lfm2",
        {"layer_types": ["full_attention", "conv", "conv"], "conv_L_cache": 5},
    ),
    "one weight": ("lfm2", {"conv_L_cache": 1}),
    "biases": ("lfm2", {"conv_bias": True}),
    "experts": ("lfm2_moe", EXPERTS),
}


@functools.cache
def pair(name: str) -> tuple[Any, Any]:
    """A tiny model of transformers, and the same one from ``init_inference``."""
    kind, changes = MODELS[name]
    model = tiny_model(kind, **{"max_position_embeddings": 512, **TYPES, **changes})
    return model, acclimate.init_inference(copy.deepcopy(model))


@functools.cache
def in_bfloat16(name: str) -> Any:
    return acclimate.init_inference(copy.deepcopy(pair(name)[0]).bfloat16())


@pytest.mark.parametrize("name", quick(tuple(MODELS), "biases"))
def test_a_long_text_is_transformers(name: str, monkeypatch: pytest.MonkeyPatch, taken: list[bool]) -> None:
    monkeypatch.setattr(loop, "ROOM", 4)  # the cache grows
    assert step_kind(pair(name)[1]) == "native"
    assert torch.equal(*texts(pair(name), inputs=PROMPT, max_new_tokens=80))
    assert taken == [True]


@pytest.mark.parametrize("name", quick(tuple(MODELS), "biases"))
def test_a_padded_batch_gets_transformers_tokens(name: str, taken: list[bool]) -> None:
    assert torch.equal(*texts(pair(name), **padded_batch(), max_new_tokens=30))
    assert taken == [True]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_prompt_shorter_than_a_convolution_gets_transformers_tokens(length: int) -> None:
    name = "attention first, a wide convolution"
    assert torch.equal(*texts(pair(name), inputs=PROMPT[:, :length], max_new_tokens=20))


@pytest.mark.parametrize("kind", ["native", "plain", "graph"])
@pytest.mark.parametrize("name", quick(tuple(MODELS), "biases"))
def test_logits_of_random_text_are_transformers(name: str, kind: str) -> None:
    own, ours = pair(name)
    lean, ids = lean_of(ours, kind), random_text(60)
    with torch.no_grad():
        expected = own(ids).logits[0]
    torch.testing.assert_close(logits_of_steps(lean, ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", quick(tuple(MODELS), "biases"))
def test_a_graph_of_a_padded_batch_gets_transformers_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_graph(pair(name), monkeypatch, 20)


@pytest.mark.parametrize("together", [2, 5, 512])
@pytest.mark.parametrize("name", quick(("lfm2", "biases", "experts"), "biases"))
def test_native_code_reads_a_padded_prompt_in_parts(
    name: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lean, prompt = lean_of(in_bfloat16(name)), padded_batch()
    monkeypatch.setattr(native, "_READ_TOGETHER", 3 * together)
    monkeypatch.setattr(cache, "_LEAST_SPARE", 1)  # inputs move often
    starts = 9 - prompt["attention_mask"].sum(-1)
    reader = lean.begin(starts, 16)
    if reader is None:
        pytest.skip("native code does not read prompts on this processor")
    positions = (prompt["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        begun = pair(name)[0](**prompt, position_ids=positions, use_cache=True)
    found = reader.read(prompt["input_ids"], likeliest=False)
    assert proof.distance(found, begun.logits[:, -1]) < 0.05
    for index, mixer in enumerate(lean.decoder.own_mixers):
        if isinstance(mixer, Convolution):
            held = reader.cache.held(index, 9 - mixer.width, 9)[0][:, 0].transpose(1, 2)
            assert proof.distance(held.float(), begun.past_key_values.get_conv_state(index)) < 0.05


def test_a_cache_of_the_callers_holds_transformers_inputs_afterwards(taken: list[bool]) -> None:
    check_callers_cache(pair("attention first, a wide convolution"))
    assert taken == [True] * 3


def test_a_cache_without_room_for_inputs_is_left_to_transformers(taken: list[bool]) -> None:
    with pytest.raises(IndexError):
        pair("biases")[1].generate(PROMPT, past_key_values=DynamicCache(), max_new_tokens=2, **ALWAYS)
    assert taken == [False]


def test_a_cache_that_records_the_past_is_left_to_transformers(taken: list[bool]) -> None:
    made = []
    for model in pair("biases"):
        held = DynamicCache(config=model.config)
        held.activate_past_recording()
        made.append(model.generate(PROMPT, past_key_values=held, max_new_tokens=9, **ALWAYS))
    assert taken == [False]
    assert torch.equal(*made)


def test_a_mask_of_other_numbers_multiplies_the_inputs_as_in_transformers(taken: list[bool]) -> None:
    prompt = padded_batch()
    prompt["attention_mask"] *= 2
    assert torch.equal(*texts(pair("biases"), **prompt, max_new_tokens=12))
    assert taken == [False]


def test_keys_in_8_bits_leave_the_inputs_of_convolutions_as_they_are() -> None:
    own, ours = pair("biases")
    lean, ids = lean_of(ours), random_text(60)
    with torch.no_grad():
        expected = own(ids).logits[0]
    for used in (lean, LeanDecoder(lean.decoder, None)):
        step = used.go_on(None, torch.zeros(1).long(), 0, 8, dtype=torch.int8)
        dtypes = [keys.dtype for keys in step.cache.keys]
        assert dtypes == [torch.float32, torch.int8, torch.float32]
        found = logits_of_steps(used, ids, dtype=torch.int8)
        assert 0 < proof.distance(found, expected) < 0.02
    quantised = acclimate.init_inference(copy.deepcopy(own), kv_cache_dtype="int8")
    assert quantised.generate(**padded_batch(), max_new_tokens=12, **ALWAYS).shape == (3, 21)


def test_a_step_that_is_taken_again_gives_the_same_logits() -> None:
    lean = lean_of(pair("biases")[1])
    for used in (lean, LeanDecoder(lean.decoder, None)):
        step = used.go_on(None, torch.zeros(1).long(), 0, 8)
        for token in random_text(7)[0].split(1):
            length = step.cache.length
            first = step(token)
            step.cache.length = length  # as after an error
            assert torch.equal(step(token), first)


@pytest.mark.parametrize("name", quick(("lfm2", "biases"), "biases"))
def test_texts_of_several_threads_are_those_of_each_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_LEAST_SPARE", 1)
    model = pair(name)[1]
    generate = text_of_a_thread(model)
    alone = [generate(number) for number in range(3)]
    assert at_once(model, generate, 3) == alone


@pytest.mark.parametrize("quantize", quick(("int8", "int4"), "int4"))
def test_quantised_weights_take_the_native_step(quantize: str) -> None:
    own = pair("biases")[0]
    ours = acclimate.init_inference(copy.deepcopy(own), quantize=quantize)
    assert step_kind(ours) == "native"  # only after its logits were compared with the modules'
    exact = copy.deepcopy(own)
    exact.load_state_dict(ours.state_dict())
    lean, ids = lean_of(ours), random_text(40)
    with torch.no_grad():
        expected, modules = exact(ids).logits[0], ours(ids).logits[0]
    errors = [float((found - expected).norm()) for found in (logits_of_steps(lean, ids), modules)]
    assert errors[0] < 1.2 * errors[1] < 0.3 * float(expected.norm())


def test_weights_that_change_between_texts_count(taken: list[bool]) -> None:
    models = pair("biases")
    before = texts(models, inputs=PROMPT, max_new_tokens=20)
    weights = [model.model.layers[0].conv.conv.weight for model in models]
    biases = [model.model.layers[2].conv.conv.bias for model in models]
    with changed(*weights, *biases):
        for weight, bias in zip(weights, biases, strict=True):
            weight.data.mul_(-1.5)
            bias.data.add_(0.5)
        after = texts(models, inputs=PROMPT, max_new_tokens=20)
    assert torch.equal(*after)
    assert not torch.equal(before[0], after[0])
    assert taken == [True, True]


@pytest.mark.slow
@pytest.mark.usefixtures("own_descriptions")
def test_the_blocks_of_a_gguf_file_take_the_native_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf

    def pack(_keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            if name.endswith(("in_proj.weight", "out_proj.weight", "ffn_up.weight")):
                tensors[name] = gguf.quantize(tensors[name], gguf.GGMLQuantizationType.Q8_0)

    proofs: list[Any] = []
    prove = proof.prove
    monkeypatch.setattr(proof, "prove", lambda *given: (proofs.append(given), prove(*given)))
    path = write_gguf("lfm2", make_model("lfm2"), tmp_path / "model.gguf", pack)
    whole = acclimate.init_inference(path, dtype="float32")
    for _ in range(2):  # the second start reads the saved description
        model = acclimate.init_inference(path)
        assert step_kind(model) == "native"
        assert model.packing.packed["q8_0"] == 4
        made = model.generate(PROMPT, max_new_tokens=12, **ALWAYS)
        with torch.no_grad():
            distance = proof.distance(model(made).logits.float(), whole(made).logits)
        assert distance < 0.1
    assert len(proofs) == 1


# -- convolutions that are written otherwise ---------------------------------------------------------------


class Rewritten(Lfm2ShortConv):  # type: ignore[misc]
    """A convolution that subclasses change in one place."""

    def forward(
        self, hidden_states: Tensor, past_key_values: Any = None, attention_mask: Any = None, **_: Any
    ) -> Tensor:
        length, width = hidden_states.shape[1], self.conv_kernel_size
        given = self.masked(hidden_states, attention_mask)
        first, gate, second = self.in_proj(given).transpose(-1, -2).chunk(3, dim=-2)
        new = first * second
        state = past_key_values.get_conv_state(self.layer_idx, state_idx=0)
        if state is not None and length == 1:
            whole = self.read(state, new)
            self.keep(state, torch.cat([state, new], -1))
            made = conv1d(whole, self.conv.weight, self.conv.bias, groups=whole.shape[1])[..., -1:]
        else:
            whole = past_key_values.update_conv_state(new, self.layer_idx, conv_kernel_size=width)
            made = conv1d(whole, self.conv.weight, self.conv.bias, padding=width - 1, groups=whole.shape[1])
            made = self.taken(made, whole.shape[-1])[..., -length:]
        result: Tensor = self.out_proj(self.finish(gate * made).transpose(-1, -2).contiguous())
        return result

    def masked(self, given: Tensor, mask: Any) -> Tensor:
        return given if mask is None else given * mask[:, :, None]

    def read(self, state: Tensor, new: Tensor) -> Tensor:
        return torch.cat([state, new], -1)

    def keep(self, state: Tensor, whole: Tensor) -> None:
        state.copy_(whole[..., -state.shape[-1] :])

    def taken(self, made: Tensor, count: int) -> Tensor:
        return made[..., :count]

    def finish(self, made: Tensor) -> Tensor:
        return made


class ThePaddingToo(Rewritten):
    def masked(self, given: Tensor, mask: Any) -> Tensor:
        return given


class TheOldestKept(Rewritten):
    def keep(self, state: Tensor, whole: Tensor) -> None:
        state.copy_(whole[..., : state.shape[-1]])


class NothingKept(Rewritten):
    def keep(self, state: Tensor, whole: Tensor) -> None:
        pass


class AnotherOrder(Rewritten):
    def read(self, state: Tensor, new: Tensor) -> Tensor:
        return torch.cat([state.flip(-1), new], -1)


class TheNextToken(Rewritten):
    def taken(self, made: Tensor, count: int) -> Tensor:
        return made[..., 1 : count + 1]


class AnActivation(Rewritten):
    def finish(self, made: Tensor) -> Tensor:
        return silu(made)


def rewritten(kind: type) -> Any:
    model = copy.deepcopy(pair("biases")[0])
    for layer in model.model.layers:
        if hasattr(layer, "conv"):
            layer.conv.__class__ = kind
    return model


def test_a_convolution_of_the_users_that_computes_the_same_takes_the_step() -> None:
    ours = acclimate.init_inference(rewritten(Rewritten))
    assert step_kind(ours) == "native"
    assert torch.equal(*texts((pair("biases")[0], ours), **padded_batch(), max_new_tokens=20))


REFUSED: dict[type, str] = {
    ThePaddingToo: "padding comes into a convolution",
    TheOldestKept: "keeps other inputs",
    NothingKept: "keeps other inputs",
    AnotherOrder: "in another order",
    TheNextToken: "not causal",
    AnActivation: "layer",
}


@pytest.mark.parametrize("kind", quick({kind.__name__: kind for kind in REFUSED}, "TheOldestKept"))
def test_a_convolution_that_computes_otherwise_is_left_to_transformers(
    kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    own = rewritten(kind)
    with caplog.at_level("INFO", "acclimate.llm"):
        ours = acclimate.init_inference(copy.deepcopy(own))
        assert step_kind(ours) == "transformers"
    assert REFUSED[kind] in caplog.text
    assert torch.equal(*texts((own, ours), **padded_batch(), max_new_tokens=20))


def test_inputs_that_are_taken_wrongly_from_transformers_cache_are_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = cache._as_keys

    def shifted(mixer: Any, layer: Any) -> tuple[Tensor, Tensor]:
        keys, values = original(mixer, layer)
        return (keys.roll(1, 2), values) if isinstance(mixer, Convolution) else (keys, values)

    monkeypatch.setattr(cache, "_as_keys", shifted)
    with caplog.at_level("INFO", "acclimate.llm"):
        assert proof.describe(acclimate.init_inference(copy.deepcopy(pair("biases")[0]))) is None
    assert "differ from a step's" in caplog.text
