"""What it costs to build an op from nothing, and to load one that was built, beside DeepSpeed's builder.

    python benchmarks/op_build.py [--rounds 3] [CPUAdamBuilder …]

Processor time is this process's and all its compilers' from ``load()`` to its return; ``import torch`` and
the choice of the accelerator come before it. Ours and the peer's take turns, each in a fresh process with an
empty cache; a figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import results
from peers import DEEPSPEED, deepspeed_python
from rich.console import Console
from rich.table import Table

OPS = ("CPUAdamBuilder", "CPUAdagradBuilder", "CPULionBuilder", "FusedAdamBuilder", "AsyncIOBuilder")
COLD_LIMIT_S = 10.0
WARM_LIMIT_S = 0.050
LESS_PROCESSOR_TIME = 4.0

LOAD = """
import json, os, resource, sys, time
import torch
from {package} import get_accelerator

def processor_s():
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)

accelerator = get_accelerator()
wall, processor = time.perf_counter(), processor_s()
builder = accelerator.create_op_builder({op!r})
if builder is None or not builder.is_compatible():
    figures = {{}}
else:
    builder.load()
    figures = dict(wall=time.perf_counter() - wall, processor=processor_s() - processor)
print("\\n" + json.dumps(figures))
"""


@dataclass(frozen=True)
class Cost:
    """Of one ``load()``; seconds."""

    wall: float
    processor: float


def load(python: Path | str, package: str, op: str, cache: str) -> Cost | None:
    """What one load in a fresh process costs; ``None`` where it cannot be built or its build fails."""
    names = ("ACCLIMATE_CACHE", "TORCH_EXTENSIONS_DIR")
    # The peer's builder runs ninja, which is beside its Python.
    path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "PATH": path, **dict.fromkeys(names, cache)}
    env.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # a warm load finds compiled modules, as an installed package has
    code = LOAD.format(package=package, op=op)
    run = subprocess.run([python, "-c", code], env=env, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        sys.stderr.write(f"{package} {op} fails, and is left out:\n{run.stdout}{run.stderr}\n")
        return None
    figures = json.loads(run.stdout.splitlines()[-1])
    return Cost(**figures) if figures else None


def measure(op: str, peer: Path, rounds: int) -> dict[str, list[Cost | None]]:
    """The cost of each round by what was measured."""
    costs: dict[str, list[Cost | None]] = {"ours": [], "ours, warm": [], "peer": [], "peer, warm": []}
    sides = [("ours", sys.executable, "acclimate"), ("peer", peer, "deepspeed.accelerator")]
    for index in range(rounds):
        for name, python, package in sides if index % 2 == 0 else reversed(sides):
            sys.stderr.write(f"{op}, round {index + 1} of {rounds}: {name}\n")  # a peer's build takes minutes
            with tempfile.TemporaryDirectory() as cache:
                costs[name].append(load(python, package, op, cache))
                costs[f"{name}, warm"].append(load(python, package, op, cache))
    return costs


def main() -> None:
    """Measures and prints the table; exits with 1 where a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ops", nargs="*", default=OPS, metavar="BUILDER")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    peer = deepspeed_python()

    table = Table(title="Building an op from nothing, and loading a built one (DeepSpeed 0.19.8 beside)")
    for column in ("op", "cold wall", "peer", "cold processor time", "peer", "peer / ours", "warm", "peer"):
        table.add_column(column, justify="left" if column == "op" else "right")
    missed = False
    kept: list[results.Figure] = []
    for op in args.ops:
        costs = measure(op, peer, args.rounds)
        ours, warm = median(costs["ours"]), median(costs["ours, warm"])
        theirs, their_warm = median(costs["peer"]), median(costs["peer, warm"])
        if ours is None or warm is None:
            table.add_row(op, "cannot be built here")
            missed = True
            continue
        if theirs and their_warm:
            name = op.removesuffix("Builder")
            kept += [
                results.Figure(f"build {name} from nothing", "s", ours.wall, {"DeepSpeed": theirs.wall}),
                results.Figure(
                    f"load {name}, once built", "ms", warm.wall * 1e3, {"DeepSpeed": their_warm.wall * 1e3}
                ),
            ]
        # Each round's two took turns, so their ratio bears a busy machine better than either figure.
        pairs = zip(costs["peer"], costs["ours"], strict=True)
        ratios = [there.processor / here.processor for there, here in pairs if there and here]
        ratio = statistics.median(ratios) if ratios else None
        missed |= ours.wall > COLD_LIMIT_S or warm.wall > WARM_LIMIT_S
        missed |= ratio is not None and ratio < LESS_PROCESSOR_TIME
        cells = (
            op,
            f"{ours.wall:.1f} s",
            f"{theirs.wall:.1f} s" if theirs else "—",
            f"{ours.processor:.1f} s",
            f"{theirs.processor:.1f} s" if theirs else "—",
            f"{ratio:.1f}" if ratio else "—",
            f"{warm.wall * 1e3:.0f} ms",
            f"{their_warm.wall * 1e3:.0f} ms" if their_warm else "—",
        )
        table.add_row(*cells)
        sys.stderr.write(" | ".join(cells) + "\n")  # kept, should the run be broken off
    Console(width=120 if not sys.stdout.isatty() else None).print(table)
    results.record("op_build", kept, {"DeepSpeed": DEEPSPEED.partition("==")[2]})
    print(
        f"goals: cold ≤ {COLD_LIMIT_S:.0f} s, 1/{LESS_PROCESSOR_TIME:.0f} of the peer's processor time, "
        f"warm < {WARM_LIMIT_S * 1e3:.0f} ms: {'missed' if missed else 'reached'}"
    )
    sys.exit(int(missed))


def median(costs: list[Cost | None]) -> Cost | None:
    """The median of each figure; ``None`` where the op cannot be built."""
    known = [cost for cost in costs if cost is not None]
    if not known:
        return None
    return Cost(
        statistics.median(cost.wall for cost in known), statistics.median(cost.processor for cost in known)
    )


if __name__ == "__main__":
    main()
