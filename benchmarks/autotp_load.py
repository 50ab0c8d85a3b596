"""A model split over 2 ranks of 1 core each: its second start, its memory while loading, and greedy decoding.

All contestants get the same folder and are started in the same way (`acclimate run --bind_cores_to_rank`);
they take turns, since figures of a shared machine vary with what else runs: read the ratios. The load of the
machine is shown.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import results
from peers import deepspeed_python
from rich.console import Console
from rich.table import Table

from acclimate.llm.loading.locate import find_model

WORKER = Path(__file__).with_name("autotp_load_worker.py")
RANKS = 2
GOALS = {"load": 2.0, "decode": 1.3}
NAMES = {"deepspeed": "DeepSpeed", "transformers": "transformers"}


def run_ranks(kind: str, python: str, folder: Path, tokens: int) -> list[dict[str, Any]]:
    """Returns the figures of each rank."""
    command = [
        *(sys.executable, "-m", "acclimate", "run", "--num_accelerators", str(RANKS)),
        *("--bind_cores_to_rank", "--no_python", python, str(WORKER), kind, str(folder), str(tokens)),
    ]
    environment = {**os.environ, "BEGAN": str(time.time()), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line.split("FIGURES ", 1)[1] for line in done.stdout.splitlines() if "FIGURES " in line]
    if done.returncode != 0 or len(lines) != RANKS:
        raise RuntimeError(f"{kind} failed with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in lines]


def main() -> int:
    """Prints a table; returns 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--model", help="a folder, a .gguf file or a hub id; default: the demo model")
    arguments = parser.parse_args()
    folder = find_model(arguments.model, lambda: "bfloat16").folder
    peer = str(deepspeed_python())
    pythons = {"acclimate": sys.executable, "deepspeed": peer, "transformers": sys.executable}
    measured: dict[str, list[dict[str, Any]]] = {kind: [] for kind in pythons}
    loads = []
    for kind, python in pythons.items():  # the first start, which may compile
        run_ranks(kind, python, folder, 8)
    for _ in range(arguments.rounds):
        for kind, python in pythons.items():
            loads.append(os.getloadavg()[0])
            measured[kind] += run_ranks(kind, python, folder, arguments.tokens)
    return report(folder, measured, loads, is_demo=arguments.model is None)


def report(folder: Path, measured: dict[str, list[dict[str, Any]]], loads: list[float], is_demo: bool) -> int:
    """Prints the figures, and records those of the demo model."""

    def median(kind: str, name: str) -> float:
        known = [run[name] for run in measured[kind] if run[name] is not None]
        return statistics.median(known) if known else math.nan

    kinds = list(measured)
    console = Console()
    table = Table("work", *kinds, title=f"{folder.name} on {RANKS} ranks of 1 core")
    rows = {
        "load, s": "load_s",
        "from the start of the process to the loaded model, s": "ready_s",
        "decoding a token, ms": "token_s",
        "peak memory of loading, MB": "peak_bytes",
        "a rank's parameters, MB": "own_bytes",
    }
    for label, name in rows.items():
        scale = 1e3 if name == "token_s" else 1e-6 if name.endswith("bytes") else 1
        figures = {kind: median(kind, name) * scale for kind in kinds}
        table.add_row(label, *("-" if math.isnan(figure) else f"{figure:.2f}" for figure in figures.values()))
    console.print(table)
    for kind in kinds[1:]:
        if error := measured[kind][0]["error"]:
            console.print(f"{kind} cannot generate: {error}")
    console.print(f"load average of the machine: {min(loads):.1f} to {max(loads):.1f}")
    tokens = {kind: measured[kind][0]["tokens"] for kind in kinds}
    for kind in kinds[1:]:
        if not tokens[kind]:
            continue
        same = sum(a == b for a, b in zip(tokens["acclimate"], tokens[kind], strict=False))
        console.print(f"{same} of {len(tokens[kind])} tokens are those of {kind}")
    ours_bytes = median("acclimate", "own_bytes") + largest_tensor(folder)
    missed = []
    for kind in kinds[1:]:
        faster = median(kind, "load_s") / median("acclimate", "load_s")
        console.print(f"load: {faster:.2f} times as fast as {kind} (goal {GOALS['load']})")
        missed += [f"load beside {kind}"] if faster < GOALS["load"] else []
    decode = median("deepspeed", "token_s") / median("acclimate", "token_s")
    console.print(f"decode: {decode:.2f} times as fast as deepspeed (goal {GOALS['decode']})")
    missed += ["decode"] if decode < GOALS["decode"] else []
    share = median("acclimate", "peak_bytes") / ours_bytes
    console.print(f"peak memory: {share:.2f} times shard and largest tensor (goal at most 1.25)")
    missed += ["memory"] if share > 1.25 else []
    if is_demo:
        record(median, kinds[1:])
    if missed:
        console.print(f"missed: {', '.join(missed)}")
    return 1 if missed else 0


def record(median: Callable[[str, str], float], peers: list[str]) -> None:
    """Records the figures for ``docs/results.json``."""
    results.record(
        "autotp_load",
        [
            results.Figure(
                "load gemma-3-270m on 2 ranks",
                "s",
                median("acclimate", "load_s"),
                {NAMES[kind]: median(kind, "load_s") for kind in peers},
            ),
            results.Figure(
                "gemma-3-270m greedy decode on 2 ranks",
                "tokens/s",
                1 / median("acclimate", "token_s"),
                {NAMES[kind]: 1 / s for kind in peers if not math.isnan(s := median(kind, "token_s"))},
            ),
        ],
    )


def largest_tensor(folder: Path) -> int:
    """Returns the bytes of a folder's largest tensor."""
    from acclimate.llm.files.checkpoint import open_weights

    with open_weights(folder) as files:
        return max(
            tensor.dtype.itemsize * prod(tensor.shape) for file in files for tensor in file.tensors.values()
        )


if __name__ == "__main__":
    sys.exit(main())
