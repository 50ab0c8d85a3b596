"""Saved plans: one for the same model, code and ranks; another for any change; never a damaged one."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from architectures import meta_model
from torch import nn

from acclimate.llm.split import make_plan, saved_plans
from acclimate.llm.split.saved_plans import load_plan, plan_key, save_plan
from quick_parameters import quick
from warm_python import WarmPython

NAMES = ("llama", "gemma3_text", "gpt2", "deepseek_v3", "t5", "whisper")
KEYS = """
import sys
import torch
from transformers import AutoModelForCausalLM
from architectures import meta_model
from acclimate.llm.decode.capture import capture
from acclimate.llm.split import make_plan
from acclimate.llm.split.saved_plans import plan_key
models = {name: meta_model(name) for name in sys.argv[2:]}
for name, model in models.items():
    print(name, plan_key(model, 2, None))
if sys.argv[1] == "again":  # what other models leave in the process is not part of a key
    for kind in ("llama", "gpt2"):
        capture(AutoModelForCausalLM.from_config(models[kind].config).eval(), {}, 2)
        make_plan(models[kind], 2)
    for name in models:
        print(name, plan_key(meta_model(name), 2, None))
"""


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACCLIMATE_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_a_key_is_the_same_in_each_process_before_and_after_other_models(warm_python: WarmPython) -> None:
    def start(again: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parent)}
        command = [sys.executable, "-c", KEYS, again, *NAMES]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    # In processes of their own, as other tests change what a model's code is. The hashes of strings differ
    # between the two: the second has those of the server that it comes from, which are random.
    with start("once") as one:
        with warm_python.in_place():
            other = start("again")
        with other:
            once, twice = (process.communicate()[0].splitlines() for process in (one, other))
    assert twice == once * 2
    assert len({line.split()[1] for line in once}) == len(NAMES)


def _patch_global(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sys.modules[type(model).__module__]
    monkeypatch.setattr(file, "apply_rotary_pos_emb", lambda q, k, cos, sin, **more: (q, k))


def _patch_class(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: self.down_proj(x))


def _patch_method_of_a_base(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight.T)


def _patch_attention(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", lambda q, k, v, **more: v)


def _patch_instance(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = model.model.layers[1].mlp
    module.forward = types.MethodType(lambda self, x: self.down_proj(self.up_proj(x)), module)


def _set_attribute(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model.layers[1].self_attn.scaling = 0.5


def _set_configuration(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.config.num_key_value_heads = 1


def _add_hook(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, output: output)


def _reshape(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].mlp.up_proj = nn.Linear(64, 120, bias=False, device="meta")


def _tie(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight


def _replace_a_class(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def _exchange_classes_that_both_occur(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = model.model.layers[1]
    layer.input_layernorm, layer.mlp.act_fn = layer.mlp.act_fn, layer.input_layernorm


@pytest.mark.parametrize(
    "change",
    [
        _patch_global,
        _add_hook,
        *(
            pytest.param(change, marks=pytest.mark.slow)
            for change in (
                _set_attribute,
                _replace_a_class,
                _patch_method_of_a_base,
                _patch_class,
                _patch_attention,
                _patch_instance,
                _set_configuration,
                _reshape,
                _tie,
                _exchange_classes_that_both_occur,
            )
        ),
    ],
)
def test_a_change_of_code_or_model_has_a_key_of_its_own(
    change: Callable[[Any, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = plan_key(meta_model("llama"), 2, None)
    assert plan_key(meta_model("llama"), 2, None) == before
    changed = meta_model("llama")
    with monkeypatch.context() as patch:
        change(changed, patch)
        assert plan_key(changed, 2, None) != before
    assert plan_key(meta_model("llama"), 2, None) == before


def test_a_change_of_any_of_our_files_has_a_key_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = tmp_path / "parallel"
    shutil.copytree(Path(saved_plans.__file__).parent, room, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(saved_plans, "__file__", str(room / "saved_plans.py"))
    model = nn.Linear(2, 2)
    keys = [plan_key(model, 2, None)]
    for path in sorted(room.rglob("*.py")):
        path.write_text(path.read_text() + "# changed\n")
        keys.append(plan_key(model, 2, None))
    assert len(keys) > 2
    assert len(set(keys)) == len(keys)


def test_ranks_and_the_users_mapping_have_keys_of_their_own() -> None:
    model = meta_model("llama")
    mappings = [None, {"lm_head": "replicated"}, {"lm_head": "columns"}]
    assert len({plan_key(model, size, mapping) for size in (2, 3) for mapping in mappings}) == 6


@pytest.mark.parametrize(
    "name", quick(("llama", "deepseek_v3", "qwen2_moe", "bloom"), "llama", "deepseek_v3")
)
def test_a_saved_plan_is_the_plan(name: str) -> None:
    plan = make_plan(meta_model(name), 2, verify=False)
    save_plan("key", plan)
    assert load_plan("key") == plan


def test_a_plan_that_was_not_saved_is_none() -> None:
    assert load_plan("key") is None


def test_a_damaged_file_is_not_used_and_is_replaced(
    private_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = make_plan(meta_model("gpt2"), 2, verify=False)
    save_plan("key", plan)
    file = private_cache / "plans" / "key" / "plan.json"
    whole = file.read_bytes()
    choice = random.Random(0)
    for _ in range(200):
        damaged = bytearray(whole)
        position = choice.randrange(len(damaged))
        damaged[position] ^= 1 << choice.randrange(8)
        file.write_bytes(damaged)
        assert load_plan("key") in (None, plan)  # a space of JSON's own may become another one
    for damage in (
        b"",
        whole[: len(whole) // 2],
        b"[]",
        b"null",
        b"{}",
        b"\xff",
        json.dumps({"plan": 1}).encode(),
    ):
        file.write_bytes(damage)
        assert load_plan("key") is None
    assert "planning again" in caplog.text
    save_plan("key", plan)
    assert load_plan("key") == plan


def test_a_cache_that_takes_no_files_only_costs_the_plan(
    private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = private_cache / "file"
    file.write_text("")
    monkeypatch.setenv("ACCLIMATE_CACHE", str(file))
    save_plan("key", make_plan(meta_model("gpt2"), 2, verify=False))
    assert load_plan("key") is None
