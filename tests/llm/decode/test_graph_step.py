"""Steps that are a graph of the accelerator, here of the host's recorded operators."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))

from architectures import tiny_model
from changed_weights import changed
from padded_prompts import padded_batch

import acclimate
from acclimate.backends.cpu import CPUAccelerator
from acclimate.llm.decode import graph_step, loop
from acclimate.llm.decode.graph_step import GraphStep
from acclimate.llm.decode.lean import LeanDecoder
from acclimate.llm.decode.plain import PlainStep
from acclimate.llm.decode.proof import distance
from quick_parameters import quick

WINDOW = {"sliding_window": 6}
TYPES = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "windows": ("gemma3_text", TYPES),
    "a softcap": ("gemma2", TYPES),
    "experts": ("qwen3_moe", {}),
    "experts and sinks": ("gpt_oss", TYPES),
    "latents": ("deepseek_v3", {}),
    "learned positions": ("gpt2", {}),
    "shared keys": (
        "gemma4_text",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            **WINDOW,
            "global_head_dim": 32,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 160,
        },
    ),
}
OPTIONS: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}


@functools.cache
def pair(name: str) -> tuple[Any, Any]:
    """A tiny model of transformers, and the same one from ``init_inference`` with steps that are graphs."""
    kind, changes = MODELS[name]
    model = tiny_model(kind, **{"max_position_embeddings": 512, **changes})
    fast = acclimate.init_inference(copy.deepcopy(model))
    lean = loop.lean_decoder(fast)
    assert lean is not None
    loop._found[fast] = LeanDecoder(lean.decoder, None, is_graph=True), loop._found[fast][1]
    assert loop.step_kind(fast) == "graph"
    return model, fast


def texts(model: Any, fast: Any, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Both models' texts for the padded batch."""
    options = OPTIONS | changes
    return model.generate(**padded_batch(), **options), fast.generate(**padded_batch(), **options)


@pytest.mark.parametrize("name", quick(tuple(MODELS), "windows"))
def test_a_padded_batch_gets_the_tokens_of_transformers(name: str) -> None:
    assert torch.equal(*texts(*pair(name)))


def test_a_text_that_outgrows_its_cache_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "ROOM", 4)
    assert torch.equal(*texts(*pair("windows"), max_new_tokens=30))


def test_logits_stay_what_they_were_after_further_steps() -> None:
    model, fast = pair("llama")
    lean = loop.lean_decoder(fast)
    assert lean is not None
    step = lean.go_on(None, torch.zeros(1).long(), 0, 8)
    assert isinstance(step, GraphStep)
    ids = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(1))
    found = torch.cat([step(token) for token in ids[0].split(1)])
    with torch.no_grad():
        torch.testing.assert_close(found, model(ids).logits[0], atol=1e-4, rtol=1e-4)


def test_a_weight_that_changes_in_place_counts_in_the_next_text() -> None:
    models = pair("llama")
    before, _ = texts(*models)
    weights = [one.model.layers[0].mlp.up_proj.weight for one in models]
    with changed(*weights):
        for weight in weights:
            weight.data.mul_(-3)
        expected, found = texts(*models)
    assert torch.equal(expected, found)
    assert not torch.equal(expected, before)


def test_a_cache_in_int8_holds_what_the_plain_steps_does() -> None:
    _, fast = pair("windows")
    lean = loop.lean_decoder(fast)
    assert lean is not None
    kinds = LeanDecoder(lean.decoder, None), lean
    steps = [one.go_on(None, torch.zeros(2).long(), 0, 8, dtype=torch.int8) for one in kinds]
    assert [type(step) for step in steps] == [PlainStep, GraphStep]
    for token in range(3, 30):
        logits = [step(torch.tensor([token, token + 9])) for step in steps]
        torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def test_texts_of_several_threads_do_not_mix() -> None:
    model, fast = pair("llama")
    prompts = [torch.arange(3 + start, 12 + start)[None] for start in range(0, 45, 15)]
    found: list[Any] = [None] * len(prompts)

    def write(index: int) -> None:
        found[index] = fast.generate(prompts[index], **OPTIONS)

    threads = [Thread(target=write, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(
        torch.equal(text, model.generate(prompt, **OPTIONS))
        for text, prompt in zip(found, prompts, strict=True)
    )


class WithGraphs(CPUAccelerator):
    """A device whose graphs are its own."""

    def create_graph(self) -> object:
        return object()


def test_only_a_model_on_one_device_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_step, "get_accelerator", WithGraphs)
    lean = loop.lean_decoder(pair("windows")[1])
    assert lean is not None
    host = torch.device("cpu")
    assert graph_step.can_capture(lean.decoder, {host})
    assert not graph_step.can_capture(lean.decoder, {host, torch.device("meta")})


@pytest.mark.parametrize("kind", quick(("qwen3_moe", "gpt_oss"), "qwen3_moe"))
def test_quantised_experts_give_what_the_plain_step_computes(kind: str) -> None:
    fast = acclimate.init_inference(tiny_model(kind), quantize="int8")
    lean = loop.lean_decoder(fast)
    assert lean is not None
    kinds = LeanDecoder(lean.decoder, None), LeanDecoder(lean.decoder, None, is_graph=True)
    steps = [one.go_on(None, torch.zeros(2).long(), 0, 8) for one in kinds]
    for token in range(3, 20):
        logits = [step(torch.tensor([token, token + 9])) for step in steps]
        # Native products of the plain step round their inputs to 8 bits.
        assert distance(*logits) < 0.05


ON_SIM = """
import copy
import torch
from architectures import tiny_model
import acclimate
from acclimate.llm.decode.loop import step_kind

device = acclimate.get_accelerator().current_device_name()
model = tiny_model("llama").to(device)
prompt = torch.arange(3, 12, device=device)[None]
fast = acclimate.init_inference(copy.deepcopy(model))
texts = [one.generate(prompt, max_new_tokens=9, do_sample=False) for one in (model, fast)]
print(device, step_kind(fast), torch.equal(*texts))
"""


@pytest.mark.slow
def test_a_device_without_graphs_of_its_own_runs_the_models_forward() -> None:
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    folder = Path(__file__).parents[1] / "split"
    env = {**os.environ, "ACCLIMATE_ACCELERATOR": "sim", "PYTHONPATH": str(folder)}
    run = subprocess.run([sys.executable, "-c", ON_SIM], env=env, capture_output=True, text=True, check=False)
    assert run.stdout == "sim:0 transformers True\n", run.stderr
