"""What becomes of a damaged model: refused in one line, loaded exactly as its files say, or a finding.

"Exactly" is told by other readers: what was loaded is turned back into the names and values of a GGUF file
and compared with what the gguf package reads, or with what safetensors and torch read from the folder.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from fuzz_cases import Case, make_case
from gguf_files import keys_of, make_model, tensors_of, write_gguf
from safetensors.torch import load_file
from tiny_models import save_tiny_model, write_tiny_gguf

import acclimate
from acclimate.errors import AcclimateError, DeviceMemoryError
from acclimate.llm import load_model
from shared_kernels import share_kernels

PROMPT = "The capital of France"
CPU_SECONDS = 20
"""For one case; a good model takes 0.1 s."""


def good_files(folder: Path) -> dict[str, Path]:
    """The models that are damaged."""
    files = {
        "folder": save_tiny_model("llama", folder / "llama"),
        "shards": save_tiny_model("llama", folder / "shards", shard_size="40KB"),
        "gguf-gemma3": write_tiny_gguf("gemma3", folder / "gemma3.gguf"),
    }
    for name in ("llama3", "mixtral", "gpt2", "stablelm2", "phi3-long"):
        files[f"gguf-{name}"] = write_gguf(name, make_model(name), folder / f"{name}.gguf")
    return files


def judge(case: Case) -> tuple[str, str]:
    """The verdict on a case (``refused``, ``loaded``, or the kind of finding), and why."""
    try:
        loaded = load_model(case.path, dtype="float32")
        acclimate.generate(PROMPT, model=loaded, max_new_tokens=2)
    except DeviceMemoryError as error:
        return "memory", str(error)
    except AcclimateError as error:
        message = str(error)
        if "\n" in message or len(message) > 1200:
            return "message", message
        return "refused", message
    except BaseException:
        return "traceback", traceback.format_exc()
    try:
        wrong = _differences(case, loaded.module)
    except Exception:
        return "unreadable", traceback.format_exc()
    return ("wrong", wrong) if wrong else ("loaded", "")


def _differences(case: Case, module: Any) -> str:
    if case.kind == "gguf":
        return "; ".join(_gguf_differences(case.path, module))
    return "; ".join(_folder_differences(case.path, module))


def _gguf_differences(path: Path, module: Any) -> Iterator[str]:
    reader = gguf.GGUFReader(path)
    architecture = str(reader.fields["general.architecture"].contents())
    stated = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    loaded = dict(tensors_of(module, architecture))
    for name in stated.keys() - loaded.keys():
        yield f"{name} is in the file and not in the model"
    for name, values in loaded.items():
        if name not in stated:
            yield f"{name} is in the model and not in the file"
        elif not np.allclose(
            values.reshape(-1), stated[name].reshape(-1), rtol=1e-5, atol=1e-6, equal_nan=True
        ):
            yield f"{name} has other values"
    for name, value in keys_of(module.config, architecture).items():
        field = reader.fields.get(name)
        if field is None:
            continue
        said = field.contents()
        same = math.isclose(said, value, rel_tol=1e-5) if isinstance(value, float) else said == value
        if not same:
            yield f"{name} is {said!r} in the file and {value!r} in the model"


def _folder_differences(path: Path, module: Any) -> Iterator[str]:
    if (path / "model.safetensors").exists():
        stated = load_file(path / "model.safetensors")
    elif shards := sorted(path.glob("*.safetensors")):
        used = set(json.loads((path / "model.safetensors.index.json").read_bytes())["weight_map"].values())
        stated = {k: v for shard in shards if shard.name in used for k, v in load_file(shard).items()}
    else:
        stated = torch.load(path / "pytorch_model.bin", weights_only=True)
    loaded = module.state_dict()
    tied = getattr(module.config, "tie_word_embeddings", False)
    for name, values in loaded.items():
        if name not in stated:
            if not (tied and name == "lm_head.weight"):
                yield f"{name} is in the model and not in the file"
        elif not torch.equal(values.nan_to_num(), stated[name].float().nan_to_num()):
            yield f"{name} has other values"
    config = json.loads((path / "config.json").read_bytes())
    for name in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
    ):
        if config.get(name) is not None and config[name] != getattr(module.config, name):
            yield f"{name} is {config[name]!r} in the file and {getattr(module.config, name)!r} in the model"


def run(first: int, last: int) -> None:
    """Judges the cases of some seeds; writes a line before and after each to stdout."""
    torch.set_num_threads(1)
    os.environ["ACCLIMATE_ACCELERATOR"] = "cpu"
    os.environ["HF_HUB_OFFLINE"] = "1"
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as root:
        good = good_files(Path(root) / "good")
        for seed in range(first, last):
            target = Path(root) / "case"
            target.mkdir()
            cache = Path(root) / "cache"
            cache.mkdir()
            share_kernels(cache)
            os.environ["ACCLIMATE_CACHE"] = str(cache)
            case = make_case(seed, good, target)
            facts = {"seed": seed, "kind": case.kind, "damage": case.damage}
            results.write(json.dumps(facts) + "\n")
            results.flush()
            # The default action ends the process, whatever C code it is in.
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            verdict, why = judge(case)
            signal.setitimer(signal.ITIMER_PROF, 0)
            results.write(
                json.dumps(facts | {"verdict": verdict, "why": re.sub(re.escape(root), "", why)}) + "\n"
            )
            results.flush()
            for name in ("case", "cache"):
                shutil.rmtree(Path(root) / name, ignore_errors=True)
