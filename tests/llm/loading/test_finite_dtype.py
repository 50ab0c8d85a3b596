"""A model that overflows in float16, on an accelerator without bfloat16: it runs in float32."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quick_parameters import quick
from shared_kernels import share_kernels
from warm_python import WarmPython

PROMPT = "The capital"

CODE = """
import json, logging, sys, torch
import acclimate
from acclimate.errors import LogitsError
from acclimate.llm import generate, load_model

notices = []
class Keep(logging.Handler):
    def emit(self, record):
        notices.append(record.getMessage())
logging.getLogger("acclimate.llm").addHandler(Keep())
large, small, prompt, way = sys.argv[1:]
found = {}

def text_of(name, load):
    notices.clear()
    try:
        made = load()
        loaded = getattr(made, "tokenizer", None) is not None
        dtype = str(made.dtype)
        ids = torch.tensor([[0, 40, 41, 42]], device="sim")
        if loaded:
            tokens = list(generate(prompt, model=made, max_new_tokens=6).tokens)
        else:
            tokens = made.generate(ids, max_new_tokens=6, do_sample=False)[0].tolist()
        found[name] = [dtype, tokens, list(notices)]
    except LogitsError as error:
        found[name] = ["LogitsError", str(error), list(notices)]

load = {"load_model": load_model, "init_inference": acclimate.init_inference}[way]
text_of("large", lambda: load(large))
text_of("asked for", lambda: load(large, dtype="float16"))
text_of("float32", lambda: load(large, dtype="float32"))
text_of("small", lambda: load(small))
if way == "init_inference":
    text_of("int8", lambda: load(large, quantize="int8"))
    text_of("asked for of torch", lambda: load(large, dtype=torch.float16))
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=quick(("load_model", "init_inference"), "load_model"))
def found(
    request: pytest.FixtureRequest,
    tiny_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    warm_models: WarmPython,
) -> Any:
    """For each model and dtype: the dtype that it has, its tokens or its error, and what was logged."""
    pytest.importorskip("acclimate_sim")
    folder = tmp_path_factory.mktemp("large") / "model"
    shutil.copytree(tiny_folder, folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.mul_(3e4)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(folder)
    cache = tmp_path_factory.mktemp("cache")
    share_kernels(cache)
    environment = {
        **os.environ, "ACCLIMATE_ACCELERATOR": "sim", "ACCLIMATE_SIM": "v100-like", "OMP_NUM_THREADS": "1",
        "ACCLIMATE_CACHE": str(cache),
    }  # fmt: skip
    with warm_models.in_place():
        run = subprocess.run(
            [sys.executable, "-c", CODE, str(folder), str(tiny_folder), PROMPT, request.param],
            env=environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_a_model_that_overflows_in_float16_runs_in_float32_and_says_so_once(found: Any) -> None:
    for model in ("large", "int8"):
        if model in found:
            dtype, tokens, notices = found[model]
            assert dtype == "torch.float32"
            assert sum("runs in float32" in notice for notice in notices) == 1
            assert tokens == found["float32"][1] or model == "int8"


def test_float16_that_was_asked_for_is_kept_and_its_infinite_logits_are_an_error(found: Any) -> None:
    for asked in ("asked for", "asked for of torch"):
        if asked in found:
            kind, message, notices = found[asked]
            assert kind == "LogitsError"
            assert "choose dtype float32" in message
            assert not any("runs in float32" in notice for notice in notices)


def test_a_model_whose_values_fit_runs_in_float16(found: Any) -> None:
    dtype, tokens, notices = found["small"]
    assert dtype == "torch.float16"
    assert tokens
    assert not any("float32" in notice for notice in notices)
