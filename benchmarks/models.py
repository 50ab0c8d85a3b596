"""Models of several sizes, with and without experts, beside llama.cpp, OpenVINO and transformers, in turns.

    python benchmarks/models.py                              # all shapes, BF16, Q8_0 and Q4_0
    python benchmarks/models.py "Qwen3-0.6B" --formats Q4_0 --rounds 3 --long 4096 8192

Weights are random (`random_models.py`); all systems read the same GGUF file, transformers its weights in
bfloat16. ACCLIMATE_PEER_LLAMA names a Python with llama-cpp-python, which also makes the quantised files.
ACCLIMATE_PEER_OPENVINO may name one with openvino-genai, optimum-intel and accelerate. It gets a folder made
of the bfloat16 file, in its own formats: fp16 beside BF16, int8 beside Q8_0, int4 beside Q4_0.
Each system runs in a process of its own, one at a time; medians of the rounds count. The limit is the time
that reading the weights of a token takes, measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import results
from random_models import SHAPES, file_of
from rich.console import Console
from rich.table import Table

FORMATS = ("BF16", "Q8_0", "Q4_0")
_OPENVINO_FORMATS = {"BF16": "fp16", "Q8_0": "int8", "Q4_0": "int4"}
Figures = dict[str, float]


def main() -> int:
    """Measures and prints a table for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {'; '.join(SHAPES)}; default: all")
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--long", nargs="*", type=int, default=[], help="also decode after so many tokens")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of acclimate's keys and values")
    parser.add_argument("--transformers", action="store_true", help="also run transformers, in BF16")
    options = parser.parse_args()
    unknown = [name for name in options.models if name not in SHAPES]
    if unknown:
        parser.error(f"there is no model {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    peer = os.environ.get("ACCLIMATE_PEER_LLAMA")
    if peer is None:
        parser.error("ACCLIMATE_PEER_LLAMA does not name a Python with llama-cpp-python")
    kept = []
    for name in options.models or SHAPES:
        for kind in options.formats:
            kept += _compare(name, kind, peer, options)
    results.record("models", kept)
    return 0


def _compare(name: str, kind: str, peer: str, options: argparse.Namespace) -> list[results.Figure]:
    """Runs all systems on one file."""
    dense = file_of(name)
    script = str(Path(__file__).with_name("inference_peers.py"))
    file = Path(str(dense).replace("BF16", kind))
    if not file.exists():
        subprocess.run([peer, script, "requantize", str(dense), kind, str(file)], check=True)
    work = [(options.prompt_tokens, options.sequences), *((length, 1) for length in options.long)]
    openvino = os.environ.get("ACCLIMATE_PEER_OPENVINO")
    exported = _exported(dense, kind, openvino, script) if openvino else None
    found: dict[str, list[Figures]] = {}
    for _ in range(options.rounds):
        systems = {"acclimate": lambda *given: _ours(file, options.kv_cache_dtype, *given)}
        systems["llama.cpp"] = lambda *given: _peer(peer, "llama.cpp file", file, file, *given)
        if openvino and exported:
            systems["OpenVINO"] = lambda *given: _peer(openvino, "OpenVINO folder", exported, file, *given)
        if options.transformers and kind == "BF16":
            systems["transformers"] = lambda *given: _peer(
                sys.executable, "transformers GGUF", file, file, *given
            )
        for system, run in systems.items():
            figures: Figures = {}
            for tokens, sequences in work:
                once = run(tokens, options.new_tokens, sequences)
                if tokens != options.prompt_tokens:
                    once = {f"decode 1 after {tokens}": once["decode 1"]}
                figures |= once
            found.setdefault(system, []).append(figures)
            # A long prompt takes minutes, and a run that is stopped keeps what was measured.
            speeds = ", ".join(f"{key} {value:,.1f}" for key, value in figures.items() if key != "peak_bytes")
            print(f"{name} {kind}, {system}: {speeds}", flush=True)
    medians = {
        system: {key: median(once[key] for once in runs) for key in runs[0]} for system, runs in found.items()
    }
    _show(f"{name} {kind}, {file.stat().st_size / 1e9:.2f} GB", medians)
    ours = medians.pop("acclimate")
    return [
        results.Figure(
            f"{work_name}, {name} {kind}",
            "tokens/s",
            ours[work_name],
            {system: figures[work_name] for system, figures in medians.items()},
        )
        for work_name in ours
        if work_name not in ("limit", "peak_bytes")
    ]


def _exported(dense: Path, kind: str, openvino: str, script: str) -> Path | None:
    """The folder for OpenVINO in the format nearest to the kind, which is made first if it is missing."""
    weights = _OPENVINO_FORMATS.get(kind)
    if weights is None:
        return None
    folder = Path(str(dense).replace("BF16.gguf", f"openvino-{weights}"))
    if not folder.exists():
        subprocess.run([openvino, script, "openvino export", str(dense), weights, str(folder)], check=True)
    return folder


def _ours(file: Path, cache_dtype: str, prompt_tokens: int, new_tokens: int, sequences: int) -> Figures:
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "acclimate", "bench", str(file), "--json", report.name]
        command += ["--prompt_tokens", str(prompt_tokens), "--new_tokens", str(new_tokens)]
        command += ["--sequences", str(sequences), "--kv_cache_dtype", cache_dtype]
        subprocess.run(command, check=True, capture_output=True)
        figures = json.loads(Path(report.name).read_text(encoding="utf-8"))
    one, *several = figures["speeds"]
    return {
        "decode 1": one["decode_tokens_per_second"],
        "decode": (several or [one])[0]["decode_tokens_per_second"],
        "prefill": one["prefill_tokens_per_second"],
        "peak_bytes": figures["peak_memory_bytes"],
        "limit": figures["read_bytes_per_second"] / figures["bytes_per_token"],
    }


def _peer(python: str, name: str, folder: Path, file: Path, *tokens: int) -> Figures:
    script = Path(__file__).with_name("inference_peers.py")
    command = [python, str(script), name, str(folder), str(file), *map(str, tokens)]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: Figures = json.loads(ended.stdout.strip().splitlines()[-1])
    return figures


def _show(title: str, medians: dict[str, Figures]) -> None:
    ours = medians["acclimate"]
    table = Table("system", *(key for key in ours if key != "peak_bytes"), "peak, GB", box=None, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for system, figures in medians.items():
        speeds = [f"{figures[key]:,.1f}" if key in figures else "" for key in ours if key != "peak_bytes"]
        table.add_row(system, *speeds, f"{figures['peak_bytes'] / 1e9:.2f}")
    best = {
        key: max(f[key] for s, f in medians.items() if s != "acclimate") for key in ours if key != "limit"
    }
    ratios = [
        f"{ours[key] / (ours['decode 1'] if key == 'limit' else best[key]):.2f}"
        for key in ours
        if key != "peak_bytes"
    ]
    table.add_row("ratio", *ratios, f"{ours['peak_bytes'] / best['peak_bytes']:.2f}")
    Console(width=110).print(table)
    Console(width=110).print(f"{results.machine()}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    sys.exit(main())
