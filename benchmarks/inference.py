"""Text generation on this processor beside its peers: the same weights, prompt and cores, in one run.

    python benchmarks/inference.py [--rounds 1] [--sequences 16] [--only "ours bf16" llama.cpp]
    python benchmarks/run.py inference      the same, and the pages and the chart show what it measured

Each system runs in a process of its own, one at a time; they take turns, and medians count. Within a round,
each figure is the median of three. A peer's Python is named by an environment variable, and a peer without
one is left out, with a note:

    ACCLIMATE_PEER_LLAMA  ACCLIMATE_PEER_OPENVINO  ACCLIMATE_PEER_VLLM_PYTHON  ACCLIMATE_PEER_TORCHAO
    ACCLIMATE_PEER_DEEPSPEED

OpenVINO also needs ACCLIMATE_PEER_OPENVINO_MODELS, a folder with `fp16`, `int8` and `int4`, each made with
`optimum-cli export openvino --task text-generation-with-past --weight-format …`. llama.cpp makes its other
files of the demo's, in the temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import results
from rich.console import Console
from rich.table import Table

from acclimate.llm.gguf.convert import BLOCKS
from acclimate.llm.loading.locate import find_model

OURS = {
    "ours bf16": ["--dtype", "bfloat16"],
    "ours int8": ["--quantize", "int8"],
    "ours int4": ["--quantize", "int4"],
    "ours GGUF": [],
    "ours Q8_0": [],
    "ours Q4_0": [],
}
FILES = {"ours Q8_0": "Q8_0", "ours Q4_0": "Q4_0"}
"""Those of ours that read a file which llama.cpp has made of the demo's, and the format of it.

`--quantize int4` keeps more bits than Q4_0 where a small model needs them: the demo's weights take 200 MB in
it and 151 in Q4_0. So each is compared with peers of its kind.
"""
PEERS = {
    "transformers": ("", "bf16"),
    "transformers compiled": ("", "bf16"),
    "DeepSpeed": ("ACCLIMATE_PEER_DEEPSPEED", "bf16"),
    "vLLM": ("ACCLIMATE_PEER_VLLM_PYTHON", "bf16"),
    "OpenVINO": ("ACCLIMATE_PEER_OPENVINO", "bf16"),
    "llama.cpp BF16": ("ACCLIMATE_PEER_LLAMA", "bf16"),
    "torchao int8": ("ACCLIMATE_PEER_TORCHAO", "int8"),
    "OpenVINO int8": ("ACCLIMATE_PEER_OPENVINO", "int8"),
    "llama.cpp Q8_0": ("ACCLIMATE_PEER_LLAMA", "Q8_0"),
    "OpenVINO int4": ("ACCLIMATE_PEER_OPENVINO", "int4"),
    "llama.cpp Q4_0": ("ACCLIMATE_PEER_LLAMA", "Q4_0"),
    "llama.cpp": ("ACCLIMATE_PEER_LLAMA", "GGUF"),
}
"""The variable with each peer's Python, if it is not this one, and which of ours it is compared with."""
VARIABLES = {
    **{name: variable for name, (variable, _) in PEERS.items()},
    **dict.fromkeys(FILES, PEERS["llama.cpp"][0]),
}
"""The variable with the Python that a system needs; without one, or an empty one: this Python."""
SLOW = ("transformers compiled", "torchao int8", "vLLM")
"""Minutes of compiling before their first token: only measured when named."""
WORK = {"decode 1": "decode, 1 sequence", "decode": "decode, {} sequences", "prefill": "prefill of {}"}
LIMIT = "reading the weights"
"""The peer that no system can beat when it decodes one sequence: memory, measured in the same run."""


def main() -> int:
    """Measures, prints a table and draws a chart."""
    parser = argparse.ArgumentParser(description="Text generation beside its peers.")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=8, help="that share the prompt's tokens")
    parser.add_argument(
        "--only", nargs="*", default=[], help=f"names of systems; default: all but {', '.join(SLOW)}"
    )
    options = parser.parse_args()
    folder, file = find_model(None, lambda: "bfloat16").folder, find_model(None, lambda: BLOCKS).gguf
    chosen = options.only or [name for name in (*OURS, *PEERS) if name not in SLOW]
    systems = [name for name in (*OURS, *PEERS) if name in chosen]
    present = [name for name in systems if _python(name) is not None]
    for name in systems:
        if name not in present:
            print(f"{name} is left out: {VARIABLES[name]} does not name its Python")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in present}
    tokens = [str(options.prompt_tokens), str(options.new_tokens), str(options.sequences)]
    work = {
        "decode 1": WORK["decode 1"],
        "decode": WORK["decode"].format(options.sequences),
        "prefill": WORK["prefill"].format(options.prompt_tokens),
    }
    for turn in range(options.rounds):
        for name in present if turn % 2 else reversed(present):
            start = time.monotonic()
            figures = _ours(name, file, tokens) if name in OURS else _peer(name, folder, file, tokens)
            print(f"{name}: measured in {time.monotonic() - start:.0f} s", flush=True)
            if figures is not None:
                found[name].append(figures)
    medians = {
        name: {key: median(run[key] for run in runs) for key in runs[0]}
        for name, runs in found.items()
        if runs
    }
    show(medians, work)
    record(medians, work)
    return 0


def _python(name: str) -> str | None:
    variable = VARIABLES.get(name)
    return os.environ.get(variable) if variable else sys.executable


def _ours(name: str, demo: Path | None, tokens: list[str]) -> dict[str, float] | None:
    model: list[str] = []
    if name in FILES:
        script = str(Path(__file__).with_name("inference_peers.py"))
        command = [str(_python(name)), script, "requantized", str(demo), FILES[name]]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            print(f"{name} failed: {made.stderr.strip()[-300:]}")
            return None
        model = [made.stdout.strip().splitlines()[-1]]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "acclimate", "bench", *model, *OURS[name], "--json", file.name]
        command += ["--prompt-tokens", tokens[0], "--new-tokens", tokens[1]]
        command += ["--sequences", tokens[2]]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            print(f"{name} failed: {ended.stderr.strip()[-300:]}")
            return None
        report = json.loads(Path(file.name).read_text(encoding="utf-8"))
    one, several = report["speeds"]
    return {
        "decode 1": one["decode_tokens_per_second"],
        "decode": several["decode_tokens_per_second"],
        "prefill": one["prefill_tokens_per_second"],
        "peak_bytes": report["peak_memory_bytes"],
        "limit": report["read_bytes_per_second"] / report["bytes_per_token"],
    }


def _peer(name: str, folder: Path, file: Path | None, tokens: list[str]) -> dict[str, float] | None:
    script = Path(__file__).with_name("inference_peers.py")
    command = [str(_python(name)), str(script), name, str(folder), str(file), *tokens]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(f"{name} failed: {ended.stderr.strip()[-300:]}")
        return None
    figures: dict[str, float] = json.loads(ended.stdout.strip().splitlines()[-1])
    return figures


def show(medians: dict[str, dict[str, float]], work: dict[str, str]) -> None:
    """Prints a row for each system."""
    table = Table("system", *work.values(), "limit", "reached", "peak, GB", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, figures in medians.items():
        limit = figures.get("limit")
        reached = "" if limit is None else f"{figures['decode 1'] / limit:.0%}"
        speeds = [f"{figures[key]:,.1f}" for key in work]
        shown = "" if limit is None else f"{limit:,.1f}"
        table.add_row(name, *speeds, shown, reached, f"{figures['peak_bytes'] / 1e9:.2f}")
    console = Console(width=110)
    console.print("tokens/s, all sequences together")
    console.print(table)
    console.print(f"{results.machine()}; load {os.getloadavg()[0]:.1f}")


def record(medians: dict[str, dict[str, Any]], work: dict[str, str]) -> None:
    """Keeps the figures for the results page."""
    kept = []
    for name in OURS:
        if name not in medians:
            continue
        kind = name.removeprefix("ours ")
        peers = [peer for peer, (_, of) in PEERS.items() if of == kind and peer in medians]
        for key, title in work.items():
            beside = {peer: medians[peer][key] for peer in peers}
            if key == "decode 1":
                beside[LIMIT] = medians[name]["limit"]
            kept.append(
                results.Figure(f"{title}, gemma-3-270m {kind}", "tokens/s", medians[name][key], beside)
            )
        memory = {peer: medians[peer]["peak_bytes"] / 1e9 for peer in peers}
        kept.append(
            results.Figure(
                f"peak memory, gemma-3-270m {kind}", "GB", medians[name]["peak_bytes"] / 1e9, memory
            )
        )
    results.record("inference", kept)


if __name__ == "__main__":
    sys.exit(main())
