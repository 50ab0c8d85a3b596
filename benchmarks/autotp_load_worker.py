"""One rank of :mod:`autotp_load`: loads a model in one way, generates greedily, and prints figures as JSON.

Run by the Python of the contestant, so it imports acclimate only where that is measured.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

PROMPT = [2, 818, 5279, 529, 7001, 563]
WARM_UP = 8


def memory(name: str) -> int:
    """Returns a figure of this process's memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def load_acclimate(folder: str) -> Any:
    """Loads with ``acclimate.init_inference``."""
    import acclimate

    return acclimate.init_inference(folder, dtype="bfloat16")


def load_transformers(folder: str) -> Any:
    """Loads with transformers' own tensor parallelism."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, tp_plan="auto")


def load_deepspeed(folder: str) -> Any:
    """Loads with DeepSpeed's AutoTP, which takes a model that is whole."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    deepspeed.init_distributed()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    size = int(os.environ["WORLD_SIZE"])
    return deepspeed.init_inference(model, tensor_parallel={"tp_size": size}, dtype=torch.bfloat16)


def prepare(kind: str) -> None:
    """Imports what loading needs."""
    import transformers.models.auto.modeling_auto
    import transformers.models.gemma3.modeling_gemma3  # noqa: F401 - imports are no part of loading

    if kind == "acclimate":
        import acclimate.llm.loading.deferred_model
        import acclimate.llm.split  # noqa: F401
    if kind == "deepspeed":
        import deepspeed  # noqa: F401


class Clock:
    """Receives tokens from transformers, and notes when."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Receives the prompt, then a token at a time."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Does nothing."""


def decode(model: Any, count: int, may_fail: bool) -> tuple[list[float], list[int], str]:
    """Returns the seconds of each greedy token, the tokens, and the error of a peer that fails."""
    clock = Clock()
    ids = torch.tensor([PROMPT])
    try:
        with torch.inference_mode():
            tokens = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=WARM_UP + count,
                min_new_tokens=WARM_UP + count,
                do_sample=False,
                streamer=clock,
            )[0].tolist()
    except RuntimeError as error:
        if not may_fail:
            raise
        return [], [], str(error)
    times = clock.times[WARM_UP:]
    return [after - at for at, after in pairwise(times)], tokens, ""


def main() -> None:
    """Prints the figures of this rank."""
    kind, folder, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    prepare(kind)
    imported = time.time() - float(os.environ["BEGAN"])
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    start = time.perf_counter()
    model = {"acclimate": load_acclimate, "transformers": load_transformers, "deepspeed": load_deepspeed}[
        kind
    ](folder)
    seconds = time.perf_counter() - start
    peak = memory("VmHWM") - before
    ready = time.time() - float(os.environ["BEGAN"])
    own = sum(
        (parameter.to_local() if hasattr(parameter, "to_local") else parameter).nbytes
        for parameter in {id(parameter): parameter for parameter in model.parameters()}.values()
    )
    steps, tokens, error = decode(model, count, may_fail=kind != "acclimate")
    figures = {
        "kind": kind,
        "rank": int(os.environ["RANK"]),
        "imported_s": imported,
        "load_s": seconds,
        "ready_s": ready,
        "peak_bytes": peak,
        "own_bytes": own,
        "token_s": statistics.median(steps) if steps else None,
        "tokens": tokens,
        "error": error,
    }
    sys.stdout.write("FIGURES " + json.dumps(figures) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
