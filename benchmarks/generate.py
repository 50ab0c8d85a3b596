"""`acclimate generate` beside plain transformers: the second start, and decoding.

Run from an environment with the extra `demo`. Both sides get the same converted folder (transformers alone
would first spend close to a minute on the GGUF file), the same dtype and the same prompt; they take turns,
for absolute figures of a shared machine mean little: read the ratio.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import results
import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache

import acclimate
from acclimate.llm import LoadedModel, load_model
from acclimate.llm.quiet import quiet_transformers

PROMPT = "The capital of France"

# The peer's whole command: what a user of transformers would write, and a mark at the first token.
PEER_START = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
import torch
class FirstToken:
    calls = 0
    def put(self, value):
        self.calls += 1
        if self.calls == 2:  # the first call hands over the prompt
            print(tokenizer.decode(value), flush=True)
    def end(self):
        pass
folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, sys.argv[2]))
ids = tokenizer(sys.argv[3], return_tensors="pt")
model.generate(**ids, max_new_tokens=1, do_sample=False, streamer=FirstToken())
"""


class Clock:
    """Receives tokens from transformers and remembers when they came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.tokens += value.reshape(-1).tolist()

    def end(self) -> None:
        pass


def our_decode(loaded: LoadedModel, new_tokens: int) -> tuple[float, list[int]]:
    result = acclimate.generate(PROMPT, model=loaded, max_new_tokens=new_tokens)
    assert result.tokens_per_second is not None
    return result.tokens_per_second, list(result.tokens)


def transformers_decode(module: Any, prompt: list[int], new_tokens: int) -> tuple[float, list[int]]:
    ids, clock = torch.tensor([prompt], device=module.device), Clock()
    with quiet_transformers():
        module.generate(ids, max_new_tokens=new_tokens, do_sample=False, streamer=clock)
    times, tokens = clock.times[1:], clock.tokens[len(prompt) :]  # the first call hands over the prompt
    return (len(times) - 1) / (times[-1] - times[0]), tokens


@torch.inference_mode()
def bare_loop_decode(module: Any, prompt: list[int], new_tokens: int) -> tuple[float, list[int]]:
    """The least that decoding can cost with this model object: no text, no penalties, no end."""
    cache = DynamicCache(config=module.config)
    ids, tokens, times = torch.tensor([prompt], device=module.device), [], []
    for _ in range(new_tokens):
        logits = module(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(int(ids))
        times.append(time.perf_counter())
    return (len(times) - 1) / (times[-1] - times[0]), tokens


def seconds(command: list[str]) -> float:
    """How long a command takes to its first byte on stdout, which both sides write at the first token."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.read(1)
    reached = time.perf_counter() - start
    process.communicate()
    return reached


def demo() -> str:
    """Runs the command of `make demo`, whose model has been converted by now; returns its last line."""
    makefile = (results.ROOT / "Makefile").read_text(encoding="utf-8")
    command = shlex.split(re.search(r"acclimate (generate .*)", makefile)[1])  # type: ignore[index]
    ended = subprocess.run(
        [sys.executable, "-m", "acclimate", *command], check=True, capture_output=True, text=True
    )
    return ended.stderr.strip().splitlines()[-1]


def measure(rounds: int, new_tokens: int) -> dict[str, Any]:
    loaded = load_model(dtype="bfloat16")  # the peer's weights, in the same folder
    prompt = loaded.tokenizer.encode(PROMPT)
    dtype = str(loaded.dtype).removeprefix("torch.")
    # Its own model object: the same weights, loaded as its users load them.
    with quiet_transformers():
        peer = AutoModelForCausalLM.from_pretrained(loaded.folder, dtype=loaded.dtype).to(
            loaded.accelerator.current_device_name()
        )
    decode: dict[str, list[float]] = {"acclimate": [], "transformers": [], "bare loop": []}
    texts = set()
    for turn in range(rounds + 1):
        sides = {
            "acclimate": lambda: our_decode(loaded, new_tokens),
            "transformers": lambda: transformers_decode(peer, prompt, new_tokens),
            "bare loop": lambda: bare_loop_decode(peer, prompt, new_tokens),
        }
        for name in list(sides) if turn % 2 else reversed(sides):
            speed, tokens = sides[name]()
            texts.add(tuple(tokens))
            if turn:  # the first turn warms up
                decode[name].append(speed)
    ours = [sys.executable, "-m", "acclimate", "generate", PROMPT, "--dtype", dtype]
    ours += ["--max-new-tokens", "1"]
    theirs = [sys.executable, "-c", PEER_START, str(loaded.folder), dtype, PROMPT]
    starts: dict[str, list[float]] = {"acclimate": [], "transformers": []}
    for _ in range(max(2, rounds // 2)):
        starts["acclimate"].append(seconds(ours))
        starts["transformers"].append(seconds(theirs))
    ratios = [a / b for a, b in zip(decode["acclimate"], decode["transformers"], strict=True)]
    return {
        "closing_line": demo(),
        "dtype": dtype,
        "accelerator": loaded.accelerator.name,
        "same_tokens": len(texts) == 1,
        "decode_tokens_per_second": {name: statistics.median(values) for name, values in decode.items()},
        "decode_ratio": statistics.median(ratios),
        "second_start_seconds": {name: statistics.median(values) for name, values in starts.items()},
    }


def show(report: dict[str, Any]) -> None:
    decode, start = report["decode_tokens_per_second"], report["second_start_seconds"]
    table = Table(title=f"the demo model, {report['dtype']}, {report['accelerator']}")
    for column in ("figure", "acclimate", "transformers", "ratio", "target"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    table.add_row(
        "decode, tokens/s (median)",
        f"{decode['acclimate']:.1f}",
        f"{decode['transformers']:.1f}",
        f"{report['decode_ratio']:.3f}",
        ">= 1, within noise",
    )
    table.add_row(
        "decode, a bare loop",
        "",
        f"{decode['bare loop']:.1f}",
        f"{decode['acclimate'] / decode['bare loop']:.3f}",
        "",
    )
    table.add_row(
        "second start to first token, s",
        f"{start['acclimate']:.2f}",
        f"{start['transformers']:.2f}",
        f"{start['acclimate'] / start['transformers']:.3f}",
        "<= 10 s",
    )
    Console().print(table)
    Console().print(f"all sides wrote the same tokens: {report['same_tokens']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    report = measure(args.rounds, args.new_tokens)
    show(report)
    record(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def record(report: dict[str, Any]) -> None:
    """Keeps the figures for the results page; the paired ratio decides how much faster decoding is."""
    ours, starts = report["decode_tokens_per_second"]["acclimate"], report["second_start_seconds"]
    theirs = {"transformers": ours / report["decode_ratio"]}
    figures = [
        results.Figure("decode, gemma-3-270m bf16", "tokens/s", ours, theirs),
        results.Figure(
            "second start to the first token",
            "s",
            starts["acclimate"],
            {"transformers": starts["transformers"]},
        ),
    ]
    results.record("generate", figures, {"transformers": transformers.__version__}, report["closing_line"])


if __name__ == "__main__":
    main()
