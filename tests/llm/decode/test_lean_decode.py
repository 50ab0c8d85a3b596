"""``generate`` of ``init_inference``'s models: a described decoder and a loop of our own."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import tiny_model
from changed_weights import changed
from tiny_models import byte_level_tokenizer
from transformers import DynamicCache, TextStreamer
from transformers.cache_utils import DynamicLayer

import acclimate
from acclimate.llm.decode import loop, native, proof
from acclimate.llm.decode.lean import LeanDecoder
from acclimate.llm.decode.loop import lean_decoder
from acclimate.llm.decode.proof import describe
from acclimate.llm.kernels.builder import CPUInferenceBuilder
from quick_parameters import quick

PROMPT = torch.arange(3, 12)[None]
WINDOW = {"sliding_window": 6}
WINDOWED = {"mistral", "gemma2", "gemma3_text", "cohere2", "exaone4", "starcoder2"}
FEW = ["gemma3_text", "gpt2"]
MANY = [
    "phi3", "cohere", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "gpt_neox", "opt",
    "stablelm", "starcoder2", "olmo", "olmo2", "olmo3", "cohere2", "granite", "gpt_bigcode", "glm", "glm4",
    "smollm3", "ernie4_5", "nemotron", "persimmon", "biogpt", "helium", "arcee", "seed_oss",
    "hunyuan_v1_dense", "exaone4",
]  # fmt: skip
ALL = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in MANY)]


@functools.cache
def pair(name: str) -> tuple[Any, Any]:
    """A tiny model of transformers, and the same one from ``init_inference``."""
    model = tiny_model(name, **(WINDOW if name in WINDOWED else {}))
    return copy.deepcopy(model), acclimate.init_inference(model)


def both(name: str, prompt: torch.Tensor = PROMPT, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"do_sample": False, "max_new_tokens": 12, **options}
    texts = []
    for model in pair(name):
        torch.manual_seed(5)
        texts.append(model.generate(prompt, **options))
    return texts[0], texts[1]


def padded_batch() -> dict[str, torch.Tensor]:
    ids = PROMPT.repeat(3, 1) + torch.tensor([[0], [40], [80]])
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    mask[2, :5] = 0
    return {"prompt": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", ALL)
def test_a_padded_batch_gets_the_tokens_of_transformers(name: str, taken: list[bool]) -> None:
    own, ours = both(name, **padded_batch(), max_new_tokens=20)
    assert taken == [True]
    assert torch.equal(own, ours)


@pytest.mark.parametrize("name", quick((*FEW, *MANY), "gemma3_text", "gpt2"))
def test_parameters_keep_their_layout(name: str) -> None:
    both(name, max_new_tokens=2)
    own, ours = ({key: (p.shape, p.stride()) for key, p in model.named_parameters()} for model in pair(name))
    assert ours == own


def test_a_weight_by_column_is_read_again_for_the_next_text(taken: list[bool]) -> None:
    _, before = both("gpt2", max_new_tokens=20)
    blocks = [net.transformer.h for net in pair("gpt2")]
    with changed(*(first.mlp.c_fc.weight for first, _ in blocks)):
        for first, second in blocks:
            # Writes through .data count in no version.
            first.mlp.c_fc.weight.data.copy_(second.mlp.c_fc.weight.data)
        own, ours = both("gpt2", max_new_tokens=20)
    assert taken == [True, True]
    assert torch.equal(own, ours)
    assert not torch.equal(ours, before)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"do_sample": True, "num_return_sequences": 3},
        {"repetition_penalty": 1.4},
        {"max_length": 15, "max_new_tokens": None},
        {"min_new_tokens": 4, "eos_token_id": list(range(0, 160, 2)), "pad_token_id": 0},
    ],
    ids=lambda options: next(reversed(options)) if "do_sample" in options else next(iter(options)),
)
def test_options_give_the_tokens_of_transformers(options: dict[str, Any], taken: list[bool]) -> None:
    own, ours = both("gemma3_text", **options)
    assert taken == [True]
    assert torch.equal(own, ours)


def test_a_text_ends_at_a_stop_string_for_which_generate_gets_a_tokenizer(taken: list[bool]) -> None:
    tokenizer = byte_level_tokenizer()
    _, whole = both("gemma3_text")
    stop = tokenizer.decode(whole[0, -6:-4])
    own, ours = both("gemma3_text", tokenizer=tokenizer, stop_strings=[stop])
    assert taken == [True, True]
    assert torch.equal(own, ours)
    assert ours.shape[1] < whole.shape[1]


def test_sequences_of_a_batch_end_at_their_end_tokens(taken: list[bool]) -> None:
    text, _ = both("gpt2", **padded_batch())
    ends = [int(text[0, -8]), int(text[1, -4]), int(text[2, -2])]
    own, ours = both("gpt2", **padded_batch(), eos_token_id=ends, pad_token_id=7)
    assert torch.equal(own, ours)
    assert (own[:, -1] == 7).any()


@pytest.mark.slow
def test_a_few_very_large_values_as_trained_models_have_them_hide_nothing() -> None:
    model = tiny_model("gemma3_text", **WINDOW).to(torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 3] = 300
        model.model.norm.weight[3] = -1  # its factor is 1 + weight: the logits come from the other columns
    assert describe(acclimate.init_inference(model)) is not None


def test_a_text_beyond_the_first_cache_and_the_window_is_the_same(
    monkeypatch: pytest.MonkeyPatch, taken: list[bool]
) -> None:
    monkeypatch.setattr(loop, "ROOM", 4)
    own, ours = both("gemma3_text", max_new_tokens=50)
    assert taken == [True]
    assert torch.equal(own, ours)


def test_a_streamer_gets_each_token(taken: list[bool]) -> None:
    class Kept(TextStreamer):
        def __init__(self) -> None:
            self.got: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.got.append(value.tolist())

        def end(self) -> None:
            self.got.append("end")

    streams = Kept(), Kept()
    for model, stream in zip(pair("gpt2"), streams, strict=True):
        model.generate(PROMPT, do_sample=False, max_new_tokens=5, streamer=stream)
    assert taken == [True]
    assert streams[0].got == streams[1].got


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"return_dict_in_generate": True, "output_scores": True},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_anything_else_is_left_to_transformers(options: dict[str, Any], taken: list[bool]) -> None:
    own, ours = both("gpt2", **options)
    assert not any(taken)
    for kept in (own, ours):
        assert isinstance(kept, torch.Tensor) or kept.scores
    sequences = [made if isinstance(made, torch.Tensor) else made.sequences for made in (own, ours)]
    assert torch.equal(*sequences)


def test_a_cache_that_the_caller_gives_is_filled() -> None:
    from transformers import DynamicCache

    caches = []
    for model in pair("gpt2"):
        caches.append(DynamicCache(config=model.config))
        model.generate(PROMPT, do_sample=False, max_new_tokens=4, past_key_values=caches[-1])
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 12


@pytest.mark.parametrize("loads_in_it", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_texts_in_and_out_of_inference_mode_are_the_same(loads_in_it: bool, taken: list[bool]) -> None:
    with torch.inference_mode(loads_in_it):
        model = acclimate.init_inference(tiny_model("gpt2"))
    texts = []
    for is_in_it in (True, False, True):
        with torch.inference_mode(is_in_it):
            texts.append(model.generate(PROMPT, do_sample=False, max_new_tokens=8).tolist())
    assert taken == [True] * 3
    assert texts == [both("gpt2", max_new_tokens=8)[0].tolist()] * 3


def lying(change: str) -> nn.Module:
    """A model that computes something that its modules and configuration do not say."""
    model = tiny_model("llama")
    layer: Any = model.get_submodule("model.layers.1")
    own = type(layer)

    class Layer(own):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            given = hidden_states.roll(1, -1) if change == "input" else hidden_states
            found = super().forward(given, *args, **kwargs)
            if change == "output":
                return found.clamp(max=1.0)
            if change == "with a cache" and hidden_states.shape[1] == 1:
                return found + 0.01
            return found

    layer.__class__ = Layer
    return model


@pytest.mark.parametrize("change", quick(("input", "output", "with a cache"), "with a cache"))
def test_a_model_whose_code_does_something_else_keeps_its_own_loop(change: str, taken: list[bool]) -> None:
    model = lying(change)
    expected = copy.deepcopy(model).generate(PROMPT, do_sample=False, max_new_tokens=8)
    assert describe(model) is None
    ours = acclimate.init_inference(model)
    assert torch.equal(ours.generate(PROMPT, do_sample=False, max_new_tokens=8), expected)
    assert taken == [False]


def test_weights_and_hooks_that_change_later_are_noticed(taken: list[bool]) -> None:
    model = tiny_model("llama")
    ours = acclimate.init_inference(copy.deepcopy(model))
    ours.generate(PROMPT, do_sample=False, max_new_tokens=2)
    for net in (model, ours):
        down = net.get_submodule("model.layers.0.mlp.down_proj")
        down.weight = nn.Parameter(down.weight * -1.5)
        net.get_submodule("model.layers.1").register_forward_hook(
            lambda module, args, output: output + 0.01 * args[0].roll(1, -1)
        )
    own, new = (net.generate(PROMPT, do_sample=False, max_new_tokens=8) for net in (model, ours))
    assert torch.equal(own, new)
    assert taken == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_norms_and_biases_that_change_in_place_are_noticed(name: str, taken: list[bool]) -> None:
    ours = acclimate.init_inference(tiny_model(name), dtype="bfloat16")
    ours.generate(PROMPT, do_sample=False, max_new_tokens=2)
    with torch.no_grad():  # as an optimizer does
        for parameter in ours.parameters():
            if parameter.dim() == 1:
                parameter.copy_(parameter.flip(0) * 3 - 0.5)
    fresh = acclimate.init_inference(copy.deepcopy(ours))
    own, new = (model.generate(PROMPT, do_sample=False, max_new_tokens=12) for model in (ours, fresh))
    assert torch.equal(own, new)
    assert taken == [True, True, True]


def test_a_text_longer_than_learned_positions_is_torchs_error(taken: list[bool]) -> None:
    for model in pair("gpt2"):
        with pytest.raises(IndexError, match="index out of range"):
            model.generate(PROMPT, do_sample=False, max_new_tokens=130)


def test_a_model_that_generated_can_be_copied_and_is_freed(taken: list[bool]) -> None:
    ours = acclimate.init_inference(tiny_model("llama"))
    text = ours.generate(PROMPT, do_sample=False, max_new_tokens=4)
    twin = copy.deepcopy(ours)
    seen = weakref.ref(ours)
    del ours
    gc.collect()
    assert seen() is None
    assert torch.equal(twin.generate(PROMPT, do_sample=False, max_new_tokens=4), text)
    assert taken == [True, True]


def test_the_first_copies_of_a_model_and_of_a_cache_derive_no_new_description() -> None:
    ours = acclimate.init_inference(tiny_model("llama"))
    own: list[type] = [type(module) for module in ours.modules() if not isinstance(module, nn.ModuleList)]
    for kind in (*own, DynamicCache, DynamicLayer):  # other tests have copied objects of them
        if "__slotnames__" in vars(kind):
            del kind.__slotnames__
    lean = lean_decoder(ours)
    copy.deepcopy(ours), copy.deepcopy(DynamicCache(config=ours.config))
    assert "__slotnames__" in vars(DynamicLayer)
    assert lean_decoder(ours) is lean is not None


def test_two_threads_generate_with_one_model() -> None:
    own, ours = pair("gpt2")
    prompts = [PROMPT, PROMPT + 30]
    expected = [own.generate(prompt, do_sample=False, max_new_tokens=25) for prompt in prompts]
    found: list[Any] = [None, None]

    def run(index: int) -> None:
        found[index] = ours.generate(prompts[index], do_sample=False, max_new_tokens=25)

    threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_angles_that_depend_on_the_length_limit_it() -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model: Any = tiny_model("llama", rope_parameters=scaling)
    lean = describe(model)
    assert lean is not None
    assert lean.decoder.limit == model.config.max_position_embeddings - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_the_native_step_rounds_where_the_plain_one_does(dtype: torch.dtype) -> None:
    model: Any = copy.deepcopy(pair("gemma3_text")[0]).to(dtype)
    lean = lean_decoder(model)
    assert lean is not None
    if lean.native is None:
        pytest.skip("there is no compiler")
    logits = []
    for decoder in (lean, LeanDecoder(lean.decoder, None)):
        with torch.no_grad():
            begun = model(PROMPT, use_cache=True)
        step = decoder.go_on(begun.past_key_values, torch.zeros(1, dtype=torch.long), 9, 9)
        logits.append(torch.cat([step(torch.tensor([token])).float() for token in (4, 90, 17)]))
    # A sum in another order can tip a value to the next one.
    assert (logits[0] - logits[1]).abs().max() <= 8 * torch.finfo(dtype).eps * logits[1].abs().max()


@pytest.mark.parametrize("weight_format", quick(("int8", "int4"), "int4"))
def test_quantised_weights_step_in_native_code(
    weight_format: str, taken: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("gemma3_text", **WINDOW).save_pretrained(tmp_path)
    ours = acclimate.init_inference(tmp_path, dtype="float32", quantize=weight_format)
    lean = lean_decoder(ours)
    assert lean is not None
    assert lean.native is not None or not CPUInferenceBuilder().is_compatible()
    new = ours.generate(PROMPT, do_sample=False, max_new_tokens=12)
    monkeypatch.setattr(loop, "lean_sample", lambda *_, **__: None)
    assert torch.equal(new, ours.generate(PROMPT, do_sample=False, max_new_tokens=12))
    assert taken == [True]


@pytest.mark.parametrize("key_heads", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_any_number_of_threads_shares_the_keys_of_few_heads(
    key_heads: int, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_key_value_heads": key_heads, "num_attention_heads": 6, "hidden_size": 96}
    model = tiny_model("llama", **sizes)
    ours = acclimate.init_inference(copy.deepcopy(model))
    prompt = (torch.arange(700) * 7 % 150 + 3)[None]
    own = model.generate(prompt, do_sample=False, max_new_tokens=20)
    for threads in range(1, 6):
        monkeypatch.setattr(native, "kernel_threads", lambda threads=threads: threads)
        assert torch.equal(own, ours.generate(prompt, do_sample=False, max_new_tokens=20)), threads
    assert taken == [True] * 5


@pytest.mark.parametrize("name", quick(("gemma3_text", "gpt2"), "gemma3_text"))
def test_without_a_compiler_the_plain_step_gives_the_same_tokens(
    name: str, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "native_decoder", lambda *_: None)
    model = copy.deepcopy(pair(name)[0])
    ours = acclimate.init_inference(copy.deepcopy(model))
    batch = padded_batch()
    texts = [
        net.generate(
            batch["prompt"], attention_mask=batch["attention_mask"], do_sample=False, max_new_tokens=9
        )
        for net in (model, ours)
    ]
    assert taken == [True]
    assert torch.equal(*texts)
