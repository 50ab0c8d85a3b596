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
large, small, prompt = sys.argv[1:]
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

text_of("load_model", lambda: load_model(large))
text_of("init_inference", lambda: acclimate.init_inference(large))
text_of("int8", lambda: acclimate.init_inference(large, quantize="int8"))
text_of("asked for", lambda: load_model(large, dtype="float16"))
text_of("asked for in init_inference", lambda: acclimate.init_inference(large, dtype=torch.float16))
text_of("float32", lambda: load_model(large, dtype="float32"))
text_of("float32 in init_inference", lambda: acclimate.init_inference(large, dtype="float32"))
text_of("small", lambda: load_model(small))
text_of("small in init_inference", lambda: acclimate.init_inference(small))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory, warm_models: WarmPython) -> Any:
    """For each way to load a model: its dtype, its tokens or its error, and what was logged."""
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
            [sys.executable, "-c", CODE, str(folder), str(tiny_folder), PROMPT],
            env=environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("way", ["load_model", "init_inference", "int8"])
def test_a_model_that_overflows_in_float16_runs_in_float32_and_says_so_once(found: Any, way: str) -> None:
    dtype, tokens, notices = found[way]
    assert dtype == "torch.float32"
    assert sum("runs in float32" in notice for notice in notices) == 1
    if way != "int8":
        expected = "float32" if way == "load_model" else "float32 in init_inference"
        assert tokens == found[expected][1]


@pytest.mark.parametrize("way", ["asked for", "asked for in init_inference"])
def test_float16_that_was_asked_for_is_kept_and_its_infinite_logits_are_an_error(
    found: Any, way: str
) -> None:
    kind, message, notices = found[way]
    assert kind == "LogitsError"
    assert "choose dtype float32" in message
    assert not any("runs in float32" in notice for notice in notices)


@pytest.mark.parametrize("way", ["small", "small in init_inference"])
def test_a_model_whose_values_fit_runs_in_float16(found: Any, way: str) -> None:
    dtype, tokens, notices = found[way]
    assert dtype == "torch.float16"
    assert tokens
    assert not any("float32" in notice for notice in notices)
