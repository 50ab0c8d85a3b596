"""What one peer does in `inference.py`: loads a model, and times prefill and decoding, in its own Python.

python inference_peers.py PEER MODEL_FOLDER GGUF_FILE PROMPT_TOKENS NEW_TOKENS

Prints one JSON object with tokens per second, all sequences together, and the peak memory. It imports nothing
of acclimate, which these environments do not have.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCHES = (1, 8)
ROUNDS = 3
Run = Callable[[int, int], None]
"""Generates so many new tokens for so many sequences."""


def transformers_run(folder: str, prompt_tokens: int, compiled: bool = False, int8: bool = False) -> Run:
    """transformers' own generate; optionally with torch.compile, and with torchao's 8-bit weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    if int8:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
    return _of_module(model, prompt_tokens, compiled)


def _of_module(model: Any, prompt_tokens: int, compiled: bool) -> Run:
    import torch

    if compiled:
        model.forward = torch.compile(model.forward, mode="max-autotune-no-cudagraphs")
        model.generation_config.cache_implementation = "static"
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    random = torch.Generator().manual_seed(0)

    def run(batch: int, tokens: int) -> None:
        ids = torch.randint(5, 1000, (batch, prompt_tokens), generator=random)
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)

    return run


def deepspeed_run(folder: str, prompt_tokens: int) -> Run:
    """DeepSpeed's inference engine around transformers' model."""
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    engine = deepspeed.init_inference(model, tensor_parallel={"tp_size": 1}, dtype=torch.bfloat16)
    return _of_module(engine.module, prompt_tokens, compiled=False)


def llama_run(gguf: str, prompt_tokens: int) -> Run:
    """llama.cpp through llama-cpp-python, one sequence after the other."""
    from llama_cpp import Llama

    threads = len(os.sched_getaffinity(0))
    model = Llama(gguf, n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False)
    prompt = [5 + index * 7 % 995 for index in range(prompt_tokens)]

    def run(batch: int, tokens: int) -> None:
        for _ in range(batch):
            model.reset()
            for index, _token in enumerate(model.generate(prompt, temp=0.0, reset=True)):
                if index + 1 == tokens:
                    break

    return run


def openvino_run(prompt_tokens: int) -> Run:
    """OpenVINO GenAI on a model that optimum exported."""
    import numpy as np
    import openvino as ov
    import openvino_genai

    exported = Path(os.environ["ACCLIMATE_PEER_OPENVINO_MODEL"])
    pipeline = openvino_genai.LLMPipeline(str(exported), "CPU")

    def run(batch: int, tokens: int) -> None:
        ids = np.random.default_rng(0).integers(5, 1000, (batch, prompt_tokens))
        inputs = openvino_genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        pipeline.generate(inputs, max_new_tokens=tokens, ignore_eos=True, do_sample=False)

    return run


def vllm_run(folder: str, prompt_tokens: int) -> Run:
    """vLLM's CPU build."""
    from vllm import LLM, SamplingParams

    model = LLM(folder, dtype="bfloat16", max_model_len=4096, enable_prefix_caching=False)

    def run(batch: int, tokens: int) -> None:
        prompts = [
            {"prompt_token_ids": [5 + (index * 7 + row) % 995 for index in range(prompt_tokens)]}
            for row in range(batch)
        ]
        given = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        model.generate(prompts, given, use_tqdm=False)

    return run


def measure(run: Run, prompt_tokens: int, new_tokens: int) -> dict[str, float]:
    """Medians of three runs, after one that warms up."""
    figures: dict[str, float] = {}
    for batch in BATCHES:
        run(batch, 2)
        first = sorted(_seconds(run, batch, 1) for _ in range(ROUNDS))[ROUNDS // 2]
        whole = sorted(_seconds(run, batch, 1 + new_tokens) for _ in range(ROUNDS))[ROUNDS // 2]
        figures[f"decode {batch}"] = batch * new_tokens / max(whole - first, 1e-9)
        if batch == 1:
            figures["prefill"] = prompt_tokens / first
    figures["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return figures


def _seconds(run: Run, batch: int, tokens: int) -> float:
    start = time.perf_counter()
    run(batch, tokens)
    return time.perf_counter() - start


def main() -> None:
    """Runs one peer."""
    peer, folder, gguf, prompt, new = sys.argv[1:]
    prompt_tokens, new_tokens = int(prompt), int(new)
    made: dict[str, Callable[[], Run]] = {
        "transformers": lambda: transformers_run(folder, prompt_tokens),
        "transformers compiled": lambda: transformers_run(folder, prompt_tokens, compiled=True),
        "torchao int8": lambda: transformers_run(folder, prompt_tokens, compiled=True, int8=True),
        "DeepSpeed": lambda: deepspeed_run(folder, prompt_tokens),
        "llama.cpp": lambda: llama_run(gguf, prompt_tokens),
        "OpenVINO": lambda: openvino_run(prompt_tokens),
        "vLLM": lambda: vllm_run(folder, prompt_tokens),
    }
    print("\n" + json.dumps(measure(made[peer](), prompt_tokens, new_tokens)))


if __name__ == "__main__":
    main()
