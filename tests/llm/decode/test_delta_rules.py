"""Models with a gated delta rule take the step, and write transformers' text."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_weights import changed
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
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5

import acclimate
from acclimate.llm.decode import cache, loop, native, proof
from acclimate.llm.decode.description import DeltaRule
from acclimate.llm.decode.lean import LeanDecoder
from acclimate.llm.decode.loop import step_kind
from acclimate.llm.decode.native import NativeStep
from acclimate.llm.read_tokens import ReadTokens
from quick_parameters import quick

SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3-next": ("qwen3_next", EXPERTS),  # key heads have their queries, keys, values and gates together
    "qwen3.5 with experts": ("qwen3_5_moe_text", EXPERTS),
    "a key head for each, a wide convolution": (
        "qwen3_5_text",
        {
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 6,
            "linear_value_head_dim": 40,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "olmo hybrid": ("olmo_hybrid", {}),  # its strengths are twice the sigmoids
    "attention alone": ("qwen3_5_text", {"layer_types": ["full_attention"] * 3}),
}
WITH_STATES = tuple(MODELS)[:-1]


@functools.cache
def pair(name: str) -> tuple[Any, Any]:
    """A tiny model of transformers, and the same one from ``init_inference``."""
    kind, changes = MODELS[name]
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for place, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if place.endswith("A_log"):
                parameter.copy_(noise - 1)  # states that last for some tokens
            elif parameter.dim() < 2 or "conv1d" in place:
                parameter.copy_(0.3 + 0.3 * noise)
            else:
                parameter.copy_(noise * (1.2 / parameter.shape[-1] ** 0.5))
    return model, acclimate.init_inference(copy.deepcopy(model))


@functools.cache
def in_bfloat16(name: str) -> Any:
    return acclimate.init_inference(copy.deepcopy(pair(name)[0]).bfloat16())


@pytest.mark.parametrize("name", quick(tuple(MODELS), "qwen3.5"))
def test_a_long_text_with_states_is_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch, taken: list[bool]
) -> None:
    monkeypatch.setattr(loop, "ROOM", 4)  # the cache grows
    assert step_kind(pair(name)[1]) == "native"
    found, expected = texts(pair(name), inputs=PROMPT, max_new_tokens=40)
    assert torch.equal(found, expected)
    assert len(set(found[0].tolist())) > 15  # a text of few tokens would hide a wrong state
    assert taken == [True]


@pytest.mark.parametrize("name", quick(tuple(MODELS), "qwen3.5"))
def test_a_padded_batch_with_states_gets_transformers_tokens(name: str, taken: list[bool]) -> None:
    assert torch.equal(*texts(pair(name), **padded_batch(), max_new_tokens=30))
    assert taken == [True]


# transformers reads a prompt in chunks of 64 tokens.
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 64, 65, 150])
@pytest.mark.parametrize("name", quick(("qwen3.5", "a key head for each, a wide convolution"), "qwen3.5"))
def test_a_prompt_of_any_length_leaves_its_state_to_the_step(
    name: str, length: int, taken: list[bool]
) -> None:
    assert torch.equal(*texts(pair(name), inputs=random_text(length), max_new_tokens=12))
    assert taken == [True]


@pytest.mark.parametrize("kind", quick(("native", "plain", "graph"), "native"))
@pytest.mark.parametrize("name", quick(tuple(MODELS), "qwen3.5"))
def test_logits_of_steps_are_those_of_a_prompt_in_chunks(name: str, kind: str) -> None:
    own, ours = pair(name)
    lean, ids = lean_of(ours, kind), random_text(80)
    with torch.no_grad():
        expected = own(ids).logits[0]
    torch.testing.assert_close(logits_of_steps(lean, ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", quick(WITH_STATES, "qwen3.5"))
def test_states_stay_in_float32_beside_bfloat16(name: str) -> None:
    lean, ids = lean_of(in_bfloat16(name)), random_text(40)
    assert lean.native is not None
    with torch.no_grad():
        exact, modules = pair(name)[0](ids).logits[0], in_bfloat16(name)(ids).logits[0]
    for used in (lean, LeanDecoder(lean.decoder, None)):
        found = logits_of_steps(used, ids)
        errors = [float((logits.float() - exact).norm()) for logits in (found, modules)]
        assert errors[0] < 1.3 * errors[1]


@pytest.mark.parametrize("name", quick(WITH_STATES, "qwen3.5"))
def test_a_graph_with_states_gets_transformers_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_graph(pair(name), monkeypatch, 12)


def test_native_code_reads_a_prompt_of_attention_with_gates() -> None:
    name = "attention alone"
    lean, prompt = lean_of(in_bfloat16(name)), padded_batch()
    assert lean.decoder.describes_prompts
    reader = lean.begin(9 - prompt["attention_mask"].sum(-1), 16)
    if reader is None:
        pytest.skip("native code does not read prompts on this processor")
    with torch.no_grad():
        positions = (prompt["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        expected = pair(name)[0](**prompt, position_ids=positions).logits[:, -1]
    assert proof.distance(reader.read(prompt["input_ids"], likeliest=False), expected) < 0.05


# -- prompts that native code reads --------------------------------------------------------------------------


def reader_of(model: Any, starts: Tensor | None = None, **options: Any) -> NativeStep:
    """Returns a step that reads a prompt."""
    step = lean_of(model).begin(torch.zeros(1).long() if starts is None else starts, 16, **options)
    if step is None:
        pytest.skip("native code does not read prompts on this processor")
    return step


def errors_of_reading(model: Any, exact: Any, step: NativeStep, prompt: dict[str, Tensor]) -> list[Tensor]:
    """Reads a prompt; returns how far its logits, states and inputs are from those of a model in float32,
    each as a multiple of how far the model's own are."""
    positions = (prompt["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected, own = (one(**prompt, position_ids=positions, use_cache=True) for one in (exact, model))
    logits = step.read(prompt["input_ids"], likeliest=False)
    held = [(logits, own.logits[:, -1], expected.logits[:, -1])]
    for index, mixer in enumerate(lean_of(model).decoder.own_mixers):
        if isinstance(mixer, DeltaRule):
            layers = [out.past_key_values.layers[index] for out in (own, expected)]
            held.append((step.cache.state(index), *(layer.recurrent_states[0] for layer in layers)))
            length = step.cache.length
            first = max(length - mixer.width, 0)
            inputs = step.cache.held(index, first, length)[0][:, 0].transpose(1, 2)
            held.append((inputs, *(layer.conv_states[0][..., first - length :] for layer in layers)))
    return [
        (found.float() - exact).norm() / ((own.float() - exact).norm() + 0.01 * exact.norm())
        for found, own, exact in held
    ]


@pytest.mark.parametrize("together", [2, 5, 512])
@pytest.mark.parametrize("name", quick(WITH_STATES, "a key head for each, a wide convolution"))
def test_native_code_reads_a_padded_prompt_with_states_in_parts(
    name: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = in_bfloat16(name), padded_batch()
    monkeypatch.setattr(native, "_READ_TOGETHER", 3 * together)
    monkeypatch.setattr(cache, "_LEAST_SPARE", 1)  # inputs move often
    step = reader_of(model, 9 - prompt["attention_mask"].sum(-1))
    assert max(errors_of_reading(model, pair(name)[0], step, prompt)) < 1.3


# transformers reads a prompt in chunks of 64 tokens.
@pytest.mark.parametrize("length", [2, 3, 5, 63, 64, 65, 150])
@pytest.mark.parametrize("name", quick(WITH_STATES, "a key head for each, a wide convolution"))
def test_native_code_reads_a_prompt_of_any_length_with_states(name: str, length: int) -> None:
    model, ids = in_bfloat16(name), random_text(length)
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert max(errors_of_reading(model, pair(name)[0], reader_of(model), prompt)) < 1.3


@pytest.mark.parametrize("quantize", quick(("int8", "int4"), "int8"))
def test_native_code_reads_a_prompt_with_quantised_weights_and_states(quantize: str) -> None:
    own = pair("qwen3.5")[0]
    ours = acclimate.init_inference(copy.deepcopy(own).bfloat16(), quantize=quantize)
    exact, ids = copy.deepcopy(own), random_text(80)
    exact.load_state_dict(ours.state_dict())
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert max(errors_of_reading(ours, exact, reader_of(ours), prompt)) < 1.3


@pytest.mark.parametrize(("together", "threads"), [(512, 3), (512, 1), (7, 2)])
def test_parts_and_threads_change_no_bit_of_states(
    together: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = in_bfloat16("a key head for each, a wide convolution"), random_text(150)
    whole = reader_of(model)
    logits = whole.read(ids, likeliest=False)
    monkeypatch.setattr(native, "_READ_TOGETHER", together)
    monkeypatch.setattr(native, "kernel_threads", lambda: threads)
    step = reader_of(model)
    assert torch.equal(step.read(ids, likeliest=False), logits)
    assert list(step.cache.states) == [0, 1]
    for index in step.cache.states:
        assert torch.equal(step.cache.state(index), whole.cache.state(index))


def test_a_part_of_a_prompt_with_states_can_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = in_bfloat16("qwen3.5"), random_text(40)
    expected = reader_of(model).read(ids, likeliest=False)
    monkeypatch.setattr(native, "_READ_TOGETHER", 16)
    step, parts = reader_of(model), itertools.count()

    @contextlib.contextmanager
    def interrupted() -> Iterator[None]:
        length = step.cache.length
        yield
        if next(parts) == 1:
            step.cache.length = length  # as after an error within the part
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step.read(ids, likeliest=False, turn=interrupted)
    assert step.cache.length == 16
    assert torch.equal(step.read(ids[:, 16:], likeliest=False), expected)


def test_a_prompt_continues_the_states_of_the_callers_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = in_bfloat16("qwen3.5"), random_text(100)
    reader_of(model)
    whole = model.generate(ids, max_new_tokens=12, **ALWAYS)
    held = DynamicCache(config=model.config)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the prompt is read by modules")

    refuse.__module__ = type(model)._prefill.__module__  # a user's own loop would be left to transformers
    monkeypatch.setattr(type(model), "_prefill", refuse)
    for length in (2, 40, 41, 100):
        assert held.get_seq_length() < length
        made = model.generate(
            ids[:, :length], past_key_values=held, max_new_tokens=12 if length == 100 else 1, **ALWAYS
        )
    assert torch.equal(made, whole)


def test_keys_in_8_bits_leave_the_states_of_a_prompt_as_they_are() -> None:
    model, ids = in_bfloat16("qwen3.5"), random_text(40)
    steps = [reader_of(model, dtype=dtype) for dtype in (None, torch.int8)]
    whole, small = (step.read(ids, likeliest=False) for step in steps)
    assert 0 < proof.distance(small, whole) < 0.06
    assert torch.equal(*(step.cache.state(0) for step in steps))  # before the layer with attention


def parameters_of_rules(*models: Any) -> list[Tensor]:
    """Returns those of the first layer, a delta rule, of models."""
    rules = [model.model.layers[0].linear_attn for model in models]
    return [
        parameter
        for rule in rules
        for parameter in (rule.A_log, rule.dt_bias, rule.conv1d.weight, rule.norm.weight)
    ]


def test_weights_that_change_between_prompts_with_states_count() -> None:
    own, ours = pair("qwen3.5")[0], in_bfloat16("qwen3.5")
    ids = random_text(80)
    reader_of(ours).read(ids, likeliest=False)
    parameters = parameters_of_rules(own, ours)
    with changed(*parameters):
        for parameter in parameters:
            parameter.data.mul_(-1.5)
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        assert max(errors_of_reading(ours, own, reader_of(ours), prompt)) < 1.3


def test_prompts_with_states_of_several_threads_are_those_of_each_alone() -> None:
    model = in_bfloat16("qwen3.5")
    reader_of(model)
    generate = text_of_a_thread(model)
    alone = [generate(number) for number in range(3)]
    assert at_once(model, generate, 3) == alone


def test_a_prompt_of_several_chunks_that_is_computed_otherwise_is_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader_of(in_bfloat16("qwen3.5"))
    original = modeling_qwen3_5.torch_chunk_gated_delta_rule

    def forgetful(*given: Tensor, **options: Any) -> Any:
        """Forgets the state after each 64 tokens."""
        options |= {"initial_state": None}
        parts = zip(*(part.split(64, 1) for part in given), strict=True)
        own = zip(*(options.pop(name).split(64, 1) for name in ("g", "beta")), strict=True)
        made = [
            original(*part, g=g, beta=beta, **options) for part, (g, beta) in zip(parts, own, strict=True)
        ]
        return torch.cat([result for result, _ in made], 1), made[-1][1]

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", forgetful)
    with caplog.at_level("INFO", "acclimate.llm"):
        assert proof.describe(acclimate.init_inference(copy.deepcopy(pair("qwen3.5")[0]).bfloat16())) is None
    assert "differ from a step's" in caplog.text


# -- caches ------------------------------------------------------------------------------------------------


def test_a_cache_of_the_callers_holds_transformers_states_afterwards(taken: list[bool]) -> None:
    check_callers_cache(pair("qwen3.5"))
    assert taken == [True] * 3


@pytest.mark.parametrize("is_reset", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", ["conv_states", "recurrent_states"])
def test_states_of_the_callers_in_another_dtype_are_left_to_transformers(
    part: str, is_reset: bool, taken: list[bool]
) -> None:
    made = []
    for model in pair("qwen3.5"):
        held = DynamicCache(config=model.config)
        with torch.no_grad():
            model(PROMPT[:, :4], past_key_values=held, use_cache=True)
        for layer in held.layers:
            if hasattr(layer, part):
                getattr(layer, part)[0] = getattr(layer, part)[0].bfloat16()
        if is_reset:  # a layer keeps its tensors, and so their dtype
            held.reset()
        made.append(model.generate(PROMPT, past_key_values=held, max_new_tokens=12, **ALWAYS))
    assert taken == [False]
    assert torch.equal(*made)  # transformers rounds the states of all tokens


def test_a_cache_with_states_that_records_the_past_is_left_to_transformers(taken: list[bool]) -> None:
    made = []
    for model in pair("qwen3.5"):
        held = DynamicCache(config=model.config)
        held.activate_past_recording()
        made.append(model.generate(PROMPT, past_key_values=held, max_new_tokens=5, **ALWAYS))
    assert taken == [False]
    assert torch.equal(*made)


def test_a_cache_with_states_cannot_be_cut_back() -> None:
    model = pair("qwen3.5")[1]
    held = DynamicCache(config=model.config)
    model.generate(PROMPT, past_key_values=held, max_new_tokens=4, **ALWAYS)
    with pytest.raises(RuntimeError, match="crop"):
        held.crop(-2)
    assert ReadTokens(model).cache is None  # conversations and the server read all tokens of each turn


def test_texts_of_a_model_with_states_and_an_assistant_are_left_to_transformers(taken: list[bool]) -> None:
    own, ours = pair("qwen3.5")
    found = []
    for model, assistant in ((own, copy.deepcopy(own)), (ours, copy.deepcopy(own))):
        try:
            found.append(
                model.generate(PROMPT, assistant_model=assistant, max_new_tokens=5, **ALWAYS).tolist()
            )
        except Exception as error:
            found.append(str(error))
    assert found[0] == found[1]
    assert True not in taken


@pytest.mark.parametrize("kind", ["native", "plain", "graph"])
def test_a_step_with_states_can_be_taken_again_once(kind: str) -> None:
    lean = lean_of(pair("qwen3.5")[1], kind)
    step = lean.go_on(None, torch.zeros(1).long(), 0, 8)
    for token in random_text(5)[0].split(1):
        length = step.cache.length
        first = step(token)
        step.cache.length = length  # as after an error
        assert torch.equal(step(token), first)
    step.cache.length -= 2
    with pytest.raises(RuntimeError, match="no recurrent state after 3 tokens"):
        step(PROMPT[0, :1])


def test_keys_in_8_bits_leave_states_as_they_are() -> None:
    own, ours = pair("qwen3.5")
    lean, ids = lean_of(ours), random_text(40)
    with torch.no_grad():
        expected = own(ids).logits[0]
    for used in (lean, LeanDecoder(lean.decoder, None)):
        step = used.go_on(None, torch.zeros(1).long(), 0, 8, dtype=torch.int8)
        assert [keys.dtype for keys in step.cache.keys] == [torch.float32, torch.int8, torch.float32]
        assert {state.dtype for state in step.cache.states.values()} == {torch.float32}
        found = logits_of_steps(used, ids, dtype=torch.int8)
        assert 0 < proof.distance(found, expected) < 0.06


def test_texts_with_states_of_several_threads_are_those_of_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "_LEAST_SPARE", 1)
    model = pair("qwen3.5")[1]
    generate = text_of_a_thread(model)
    alone = [generate(number) for number in range(3)]
    assert at_once(model, generate, 3) == alone


def test_states_that_are_taken_wrongly_from_transformers_cache_are_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = cache.StepCache.take

    def swapped(self: cache.StepCache, given: Any) -> None:
        original(self, given)
        for index in self.states:
            self.state(index).copy_(self.state(index).flip(1))

    monkeypatch.setattr(cache.StepCache, "take", swapped)
    with caplog.at_level("INFO", "acclimate.llm"):
        assert proof.describe(acclimate.init_inference(copy.deepcopy(pair("qwen3.5")[0]))) is None
    assert "differ from a step's" in caplog.text


# -- weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", quick(("int8", "int4"), "int8"))
def test_quantised_weights_beside_states_take_the_native_step(quantize: str) -> None:
    own = pair("qwen3.5")[0]
    ours = acclimate.init_inference(copy.deepcopy(own), quantize=quantize)
    assert step_kind(ours) == "native"  # only after its logits were compared with the modules'
    exact = copy.deepcopy(own)
    exact.load_state_dict(ours.state_dict())
    lean, ids = lean_of(ours), random_text(30)
    with torch.no_grad():
        expected, modules = exact(ids).logits[0], ours(ids).logits[0]
    errors = [float((found - expected).norm()) for found in (logits_of_steps(lean, ids), modules)]
    assert errors[0] < 1.3 * errors[1] < 0.5 * float(expected.norm())


def test_weights_of_a_delta_rule_that_change_between_texts_count(taken: list[bool]) -> None:
    models = pair("qwen3.5")
    before = texts(models, inputs=PROMPT, max_new_tokens=12)
    parameters = parameters_of_rules(*models)
    with changed(*parameters):
        for parameter in parameters:
            parameter.data.mul_(-1.5)
        after = texts(models, inputs=PROMPT, max_new_tokens=12)
    assert torch.equal(*before)
    assert torch.equal(*after)
    assert not torch.equal(before[0], after[0])
    assert taken == [True, True]


@pytest.mark.slow
@pytest.mark.usefixtures("own_descriptions")
def test_the_description_of_a_delta_rule_is_saved_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs: list[Any] = []
    prove = proof.prove
    monkeypatch.setattr(proof, "prove", lambda *given: (proofs.append(given), prove(*given)))
    own = pair("qwen3.5")[0]
    own.save_pretrained(tmp_path)
    expected = own.generate(PROMPT, max_new_tokens=20, **ALWAYS)
    for _ in range(2):
        model = acclimate.init_inference(tmp_path, dtype="float32")
        assert step_kind(model) == "native"
        assert torch.equal(model.generate(PROMPT, max_new_tokens=20, **ALWAYS), expected)
    assert len(proofs) == 1


# -- delta rules that are written otherwise ------------------------------------------------------------------


class Rewritten(modeling_qwen3_5.Qwen3_5GatedDeltaNet):  # type: ignore[misc]
    """A delta rule that subclasses change in one place."""

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Any = None, **_: Any
    ) -> Tensor:
        batch, length, _width = hidden_states.shape
        given = hidden_states if attention_mask is None else hidden_states * attention_mask[:, :, None]
        inputs = cache_params.get_conv_state(self.layer_idx, state_idx=0)
        state = cache_params.get_recurrent_state(self.layer_idx, state_idx=0)
        new, width = self.in_proj_qkv(given).transpose(1, 2), self.conv_kernel_size
        if inputs is not None and length == 1:
            whole = torch.cat([inputs, new], -1)
            inputs.copy_(whole[..., -width:])
            mixed = conv1d(whole, self.conv1d.weight, groups=whole.shape[1])[..., -1:]
        else:
            whole = cache_params.update_conv_state(new, self.layer_idx, conv_kernel_size=width)
            mixed = conv1d(whole, self.conv1d.weight, padding=width - 1, groups=whole.shape[1])
            mixed = mixed[..., : whole.shape[-1]][..., -length:]
        parts = self.parts(silu(mixed).transpose(1, 2))
        group = self.num_v_heads // self.num_k_heads
        query, key = (
            self.unit(part.view(batch, length, -1, self.head_k_dim).repeat_interleave(group, 2).float())
            for part in parts[:2]
        )
        query = query * self.head_k_dim**-0.5
        value = parts[2].view(batch, length, -1, self.head_v_dim).float()
        decay, strength = self.decay(self.in_proj_a(given)), self.strength(self.in_proj_b(given)).float()
        if state is None:
            state = query.new_zeros((batch, self.num_v_heads, self.head_k_dim, self.head_v_dim))
        made = []
        for i in range(length):
            before = state
            state = state * decay[:, i, :, None, None]
            held = (self.seen(before, state) * key[:, i, :, :, None]).sum(-2)
            change = (value[:, i] - held) * strength[:, i, :, None]
            state = state + key[:, i, :, :, None] * change[:, :, None]
            made.append((state * query[:, i, :, :, None]).sum(-2))
        cache_params.update_recurrent_state(self.kept(before, state), self.layer_idx)
        result = torch.stack(made, 1).to(hidden_states.dtype).reshape(-1, self.head_v_dim)
        gate = self.in_proj_z(given).reshape(-1, self.head_v_dim)
        output: Tensor = self.out_proj(self.gated(result, gate).reshape(batch, length, -1))
        return output

    def parts(self, mixed: Tensor) -> tuple[Tensor, ...]:
        return torch.split(mixed, [self.key_dim, self.key_dim, self.value_dim], -1)

    def unit(self, heads: Tensor) -> Tensor:
        return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + 1e-6)

    def decay(self, given: Tensor) -> Tensor:
        return (-self.A_log.float().exp() * softplus(given.float() + self.dt_bias)).exp()

    def strength(self, given: Tensor) -> Tensor:
        return given.sigmoid()

    def seen(self, before: Tensor, decayed: Tensor) -> Tensor:
        return decayed

    def kept(self, before: Tensor, after: Tensor) -> Tensor:
        return after

    def gated(self, result: Tensor, gate: Tensor) -> Tensor:
        gated: Tensor = self.norm(result, gate)
        return gated


class AnotherDecay(Rewritten):
    def decay(self, given: Tensor) -> Tensor:
        return (-self.A_log.float().exp() * (given.float() + self.dt_bias).square()).exp()


class NoLengths(Rewritten):
    def unit(self, heads: Tensor) -> Tensor:
        return heads


class LargestNumbers(Rewritten):
    def unit(self, heads: Tensor) -> Tensor:
        return heads / (heads.abs().amax(-1, keepdim=True) + 1)


class AnotherStrength(Rewritten):
    def strength(self, given: Tensor) -> Tensor:
        return given.tanh()


class TheStateBefore(Rewritten):
    def seen(self, before: Tensor, decayed: Tensor) -> Tensor:
        return before


class TheOldStateKept(Rewritten):
    def kept(self, before: Tensor, after: Tensor) -> Tensor:
        return before


class AnotherOrderOfParts(Rewritten):
    def parts(self, mixed: Tensor) -> tuple[Tensor, ...]:
        key, query, value = super().parts(mixed)
        return query, key, value


class AnotherGate(Rewritten):
    def gated(self, result: Tensor, gate: Tensor) -> Tensor:
        normed = result * torch.rsqrt(result.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.norm.weight * normed * gate.sigmoid()


class TheNormAfterTheGate(Rewritten):
    def gated(self, result: Tensor, gate: Tensor) -> Tensor:
        gated = result * silu(gate)
        return self.norm.weight * (gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + 1e-6))


def rewritten(kind: type) -> Any:
    model = copy.deepcopy(pair("qwen3.5")[0])
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.__class__ = kind
    return model


def test_a_delta_rule_of_the_users_that_computes_the_same_takes_the_step() -> None:
    ours = acclimate.init_inference(rewritten(Rewritten))
    assert step_kind(ours) == "native"
    # A capture of a prompt, which would show that any prompt is computed so, is not possible.
    assert not lean_of(ours).decoder.describes_prompts
    assert lean_of(pair("qwen3.5")[1]).decoder.describes_prompts
    assert torch.equal(*texts((pair("qwen3.5")[0], ours), **padded_batch(), max_new_tokens=12))


REFUSED: dict[type, str] = {
    AnotherDecay: "the decay of a delta rule is computed in an unknown way",
    NoLengths: "not divided by their length",
    LargestNumbers: "not divided by their length",
    AnotherStrength: "the strengths of a delta rule are made with tanh",
    TheStateBefore: "a recurrent state is changed in an unknown way",
    TheOldStateKept: "its recurrent state is computed with",
    AnotherOrderOfParts: "in another order",
    AnotherGate: "the gate of a delta rule is made with",
    TheNormAfterTheGate: "its recurrent state is computed with",
}


@pytest.mark.parametrize("kind", quick({kind.__name__: kind for kind in REFUSED}, "NoLengths"))
def test_a_delta_rule_that_computes_otherwise_is_left_to_transformers(
    kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    own = rewritten(kind)
    with caplog.at_level("INFO", "acclimate.llm"):
        ours = acclimate.init_inference(copy.deepcopy(own))
        assert step_kind(ours) == "transformers"
    assert REFUSED[kind] in caplog.text
    assert torch.equal(*texts((own, ours), **padded_batch(), max_new_tokens=6))


def test_the_description_says_what_the_configuration_says() -> None:
    lean = lean_of(pair("qwen3.5")[1])
    rules = [layer.mixer for layer in lean.decoder.layers if isinstance(layer.mixer, DeltaRule)]
    assert [(rule.heads, rule.key_heads, rule.key_size, rule.value_size) for rule in rules] == [
        (4, 2, 8, 12)
    ] * 2
    assert {(rule.activation, rule.gate_activation, rule.width) for rule in rules} == {("silu", "silu", 4)}
