"""What one peer does in `inference.py`: loads a model, and times prefill and decoding, in its own Python.

python inference_peers.py PEER MODEL_FOLDER GGUF_FILE PROMPT_TOKENS NEW_TOKENS SEQUENCES
python inference_peers.py requantize GGUF_FILE FORMAT NEW_FILE
python inference_peers.py requantized GGUF_FILE FORMAT    prints the path of one in the temporary folder
python inference_peers.py "openvino export" GGUF_FILE FORMAT NEW_FOLDER    with optimum, in fp16, int8 or int4

Prints one JSON object with tokens per second, all sequences together, and the peak memory. Several sequences
share the prompt's tokens. It imports nothing of acclimate, which these environments lack.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

ROUNDS = 3
Run = Callable[[int, int, int], float | None]
"""Generates, for so many sequences of a length, so many new tokens. It returns the time of
:func:`time.perf_counter` at which the first token of each sequence was there, if the system tells."""


def transformers_run(folder: str, compiled: bool = False, int8: bool = False, file: str | None = None) -> Run:
    """transformers' own generate; optionally with torch.compile, torchao's 8-bit weights, or a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM

    options = {"gguf_file": file} if file else {}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()
    if int8:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
    return _of_module(model, compiled)


def _of_module(model: Any, compiled: bool) -> Run:
    import torch

    if compiled:
        model.forward = torch.compile(model.forward, mode="max-autotune-no-cudagraphs")
        model.generation_config.cache_implementation = "static"
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    random = torch.Generator().manual_seed(0)

    def run(sequences: int, length: int, tokens: int) -> None:
        ids = torch.randint(5, 1000, (sequences, length), generator=random)
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)

    return run


def deepspeed_run(folder: str) -> Run:
    """DeepSpeed's inference engine around transformers' model."""
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    engine = deepspeed.init_inference(model, tensor_parallel={"tp_size": 1}, dtype=torch.bfloat16)
    return _of_module(engine.module, compiled=False)


def llama_run(gguf: str, prompt_tokens: int, new_tokens: int, most_sequences: int, kind: str) -> Run:
    """llama.cpp through llama-cpp-python: sequences share a batch, each with a cache of its own.

    Its Q8_0 and Q4_0 files are made of the given one, the head in Q4_0 too.
    """
    import llama_cpp
    import numpy as np

    llama_cpp.llama_backend_init()
    _silence_llama()
    path = gguf if kind in ("Q4_K_M", "file") else _requantized(gguf, kind)
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_seq_max = most_sequences
    params.n_ctx = most_sequences * 2 * (prompt_tokens + new_tokens + 8)
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    params.n_batch = prompt_tokens
    context = llama_cpp.llama_init_from_model(model, params)
    words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(max(prompt_tokens, most_sequences), 0, 1)

    def decode(entries: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(entries)
        for index, (token, place, sequence, wants_logits) in enumerate(entries):
            batch.token[index], batch.pos[index] = token, place
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = wants_logits
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")

    def likeliest(index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, index)
        return int(np.ctypeslib.as_array(logits, (words,)).argmax())

    def run(sequences: int, length: int, tokens: int) -> float:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        chosen = []
        for sequence in range(sequences):
            decode([(5 + (place * 7 + sequence) % 995, place, sequence, place + 1 == length)
                    for place in range(length)])  # fmt: skip
            chosen.append(likeliest(length - 1))
        first = time.perf_counter()
        for place in range(length, length + tokens - 1):
            decode([(token, place, sequence, True) for sequence, token in enumerate(chosen)])
            chosen = [likeliest(sequence) for sequence in range(sequences)]
        return first

    return run


@cache
def _silence_llama() -> Any:
    """Keeps llama.cpp from logging. The callback is kept, since llama.cpp calls it until the process ends."""
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, None)
    return silent


def _requantized(gguf: str, kind: str) -> str:
    import tempfile

    path = Path(tempfile.gettempdir(), f"acclimate-benchmark-{os.getuid()}-{Path(gguf).stem}-{kind}.gguf")
    if not path.exists():
        requantize(gguf, kind, path)
    return str(path)


def requantize(gguf: str, kind: str, path: Path) -> None:
    """Makes a GGUF file in another format, with every matrix in it, the head too."""
    import llama_cpp

    _silence_llama()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.allow_requantize, params.pure = True, True
    part = path.with_suffix(f".{os.getpid()}")
    if llama_cpp.llama_model_quantize(gguf.encode(), str(part).encode(), params):
        raise RuntimeError(f"llama.cpp cannot make a {kind} file of {gguf}")
    part.replace(path)


def openvino_export(gguf: str, weights: str, folder: Path) -> None:
    """Makes a folder for OpenVINO GenAI of a GGUF file's weights, without a tokenizer."""
    import torch
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoModelForCausalLM

    file = Path(gguf)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    widths = [layer.in_features for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    part = folder.with_suffix(f".{os.getpid()}")
    model.save_pretrained(part / "torch")
    del model
    options: dict[str, Any] = {"load_in_8bit": False}
    if weights == "int8":
        options = {"quantization_config": OVWeightQuantizationConfig(bits=8)}
    elif weights == "int4":
        # Rows are whole groups: of 128, as is usual, or of fewer columns.
        group = math.gcd(128, *widths)
        options = {"quantization_config": OVWeightQuantizationConfig(bits=4, group_size=group)}
    made = OVModelForCausalLM.from_pretrained(part / "torch", export=True, compile=False, **options)
    made.save_pretrained(part)
    shutil.rmtree(part / "torch")
    part.replace(folder)


def openvino_run(exported: Path) -> Run:
    """OpenVINO GenAI on a folder that optimum exported."""
    import numpy as np
    import openvino as ov
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(str(exported), "CPU")
    random = np.random.default_rng(0)

    def run(sequences: int, length: int, tokens: int) -> None:
        ids = random.integers(5, 1000, (sequences, length))  # new ones: it keeps what it made of a prefix
        inputs = openvino_genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        pipeline.generate(inputs, max_new_tokens=tokens, ignore_eos=True, do_sample=False)

    return run


def vllm_run(folder: str) -> Run:
    """vLLM's CPU build."""
    from vllm import LLM, SamplingParams

    model = LLM(folder, dtype="bfloat16", max_model_len=4096, enable_prefix_caching=False)

    def run(sequences: int, length: int, tokens: int) -> None:
        prompts = [
            {"prompt_token_ids": [5 + (index * 7 + row) % 995 for index in range(length)]}
            for row in range(sequences)
        ]
        given = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        model.generate(prompts, given, use_tqdm=False)

    return run


def measure(run: Run, prompt_tokens: int, new_tokens: int, sequences: int) -> dict[str, float]:
    """Medians of three runs, after one that warms up."""
    figures: dict[str, float] = {}
    for batch in dict.fromkeys((1, sequences)):
        length = max(prompt_tokens // batch, 1)
        run(batch, length, 2)
        rounds = [_seconds(run, batch, length, new_tokens) for _ in range(ROUNDS)]
        first, rest = (median(seconds) for seconds in zip(*rounds, strict=True))
        if rest <= 0:
            raise RuntimeError("other work took so much time that more tokens took less: measure again")
        figures["decode"] = batch * new_tokens / rest
        if batch == 1:
            figures |= {"decode 1": figures["decode"], "prefill": prompt_tokens / first}
    figures["peak_bytes"] = _peak_bytes()
    return figures


def _seconds(run: Run, sequences: int, length: int, tokens: int) -> tuple[float, float]:
    """The seconds until the first token of each sequence, and for so many more."""
    start = time.perf_counter()
    first = run(sequences, length, 1 + tokens)
    end = time.perf_counter()
    if first is not None:
        return first - start, end - first
    run(sequences, length, 1)
    seconds = time.perf_counter() - end
    return seconds, end - start - seconds


def _peak_bytes() -> int:
    """Returns this program's peak; ru_maxrss would also count the process that started it, until its exec."""
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return int(peak) * 1024


def main() -> None:
    """Runs one peer."""
    peer, folder, gguf = sys.argv[1:4]
    if peer == "requantize":
        requantize(folder, gguf, Path(sys.argv[4]))
        return
    if peer == "requantized":
        print(_requantized(folder, gguf))
        return
    if peer == "openvino export":
        openvino_export(folder, gguf, Path(sys.argv[4]))
        return
    prompt_tokens, new_tokens, sequences = (int(argument) for argument in sys.argv[4:])

    def llama(kind: str) -> Run:
        return llama_run(gguf, prompt_tokens, new_tokens, sequences, kind)

    def openvino(weights: str) -> Run:
        return openvino_run(Path(os.environ["ACCLIMATE_PEER_OPENVINO_MODELS"], weights))

    made: dict[str, Callable[[], Run]] = {
        "transformers": lambda: transformers_run(folder),
        "transformers GGUF": lambda: transformers_run(str(Path(gguf).parent), file=Path(gguf).name),
        "transformers compiled": lambda: transformers_run(folder, compiled=True),
        "torchao int8": lambda: transformers_run(folder, compiled=True, int8=True),
        "DeepSpeed": lambda: deepspeed_run(folder),
        "vLLM": lambda: vllm_run(folder),
        "OpenVINO": lambda: openvino("fp16"),
        "OpenVINO folder": lambda: openvino_run(Path(folder)),
        "OpenVINO int8": lambda: openvino("int8"),
        "OpenVINO int4": lambda: openvino("int4"),
        "llama.cpp BF16": lambda: llama("BF16"),
        "llama.cpp Q8_0": lambda: llama("Q8_0"),
        "llama.cpp Q4_0": lambda: llama("Q4_0"),
        "llama.cpp": lambda: llama("Q4_K_M"),
        "llama.cpp file": lambda: llama("file"),
    }
    print("\n" + json.dumps(measure(made[peer](), prompt_tokens, new_tokens, sequences)))


if __name__ == "__main__":
    main()
