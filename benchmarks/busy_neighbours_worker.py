"""One process of busy_neighbours.py: reads seconds from its input, works so long, and prints the speed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

TOKENS = 32
CALLS = 20


def llama(path: str) -> Callable[[], int]:
    """llama.cpp on a GGUF file."""
    from llama_cpp import Llama

    threads = len(os.sched_getaffinity(0))
    model = Llama(path, n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)

    def some() -> int:
        model.reset()
        model.eval(list(range(5, 21)))
        for token in range(TOKENS):
            model.eval([token + 5])
        return TOKENS

    return some


def model_of(kind: str) -> Any:
    """A model with random weights in bfloat16: transformers', ours, on one thread, or split."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    if kind in ("one thread", "ranks"):
        torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    if kind == "transformers":
        return model
    import acclimate

    if kind == "ranks":
        acclimate.init_distributed("shm")
        return acclimate.init_inference(model, tp_size=2)
    return acclimate.init_inference(model)


def decoding(kind: str) -> Callable[[], int]:
    """Greedy decoding after 16 tokens."""
    import torch

    model, ids = model_of(kind), torch.arange(5, 21)[None]

    def some() -> int:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=TOKENS,
            max_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return TOKENS

    return some


def summing(backend: str) -> Callable[[], int]:
    """all_reduce of two ranks."""
    import torch
    import torch.distributed as dist

    import acclimate

    torch.set_num_threads(1)
    acclimate.init_distributed(backend)
    tensor = torch.zeros(4096)

    def some() -> int:
        for _ in range(CALLS):
            dist.all_reduce(tensor)
        return CALLS

    return some


def main() -> None:
    kind = sys.argv[1]
    some = (
        llama(sys.argv[2])
        if kind == "llama.cpp"
        else summing(kind)
        if kind in ("shm", "gloo")
        else decoding(kind)
    )
    some()
    is_of_ranks = int(os.environ["WORLD_SIZE"]) > 1
    print("= ready", flush=True)
    for line in sys.stdin:
        start, done, goes_on = time.perf_counter(), 0, True
        while goes_on:
            done += some()
            goes_on = time.perf_counter() - start < float(line)
            if is_of_ranks:
                goes_on = all_go_on(goes_on)
        print(f"= {done / (time.perf_counter() - start)}", flush=True)


def all_go_on(goes_on: bool) -> bool:
    """Whether every rank goes on."""
    import torch
    import torch.distributed as dist

    flag = torch.tensor(float(goes_on))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


if __name__ == "__main__":
    main()
