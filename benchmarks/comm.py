"""Collectives between ranks of this host, beside those of gloo, DeepSpeed and vLLM, in one run.

    python benchmarks/comm.py [op backend many ddp] [--picture docs/comm.png]

Two ranks have a core each. Contenders take turns in bursts of 0.3 ms or one call; a tenth of the bursts were
faster than the figure, as other work on the machine only ever adds time. All run in the Python that has
DeepSpeed. `make bench` draws the times over the sizes into docs/comm.png.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import results
from peers import DEEPSPEED, VLLM, deepspeed_python, vllm_library
from rich.console import Console
from rich.table import Table

from acclimate.host.local_address import free_port

PARTS = {"op": 2, "backend": 2, "many": 8, "ddp": 2}
"""What is measured, and over how many ranks."""
SOURCE = Path(__file__).parents[1] / "src"
PICTURE = results.ROOT / "docs" / "comm.png"
BOUNDS = {"DDP, no communication": 1.15, "DDP, only a barrier": math.inf, "no DDP": math.inf}
"""Not peers, but the same without communication: how many times as long as it a step may take."""


def main() -> int:
    """Measures, prints a table and draws a picture; returns 1 where we are slower than a peer."""
    parser = argparse.ArgumentParser(description="Collectives beside their peers.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    is_recorded = bool(os.environ.get(results.FOLDER_VARIABLE))
    parser.add_argument(
        "--picture",
        type=Path,
        default=PICTURE if is_recorded else None,
        help="where to draw the times over the sizes",
    )
    options = parser.parse_args()
    python = deepspeed_python()
    library = vllm_library()
    figures = [figure for part in options.parts or PARTS for figure in measure(part, python, library)]
    show(figures)
    if options.picture:
        draw(figures, options.picture)
    kept = [
        results.Figure(
            f"{figure['work']}, {figure['elements']:,} {figure['dtype']}",
            "µs",
            figure["microseconds"]["acclimate"],
            {name: time for name, time in figure["microseconds"].items() if name != "acclimate"},
        )
        for figure in figures
    ]
    results.record("comm", kept, {"DeepSpeed": DEEPSPEED.partition("==")[2], "vLLM": VLLM.partition("==")[2]})
    goals = [(figure.advantage(peer), 1 / BOUNDS.get(peer, 1)) for figure in kept for peer in figure.peers]
    return 0 if all(advantage >= goal for advantage, goal in goals) else 1


def measure(part: str, python: Path, vllm: Path) -> list[dict[str, Any]]:
    """The figures of one part."""
    size = PARTS[part]
    port = free_port()
    ranks = []
    for rank in range(size):
        told = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size,
                "LOCAL_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        environ = {**os.environ, **{name: str(value) for name, value in told.items()}}
        environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "ignore"}
        # Else glibc returns freed gradients to the kernel or not, as they happen to lie: in each run, page
        # faults took 60 of 200 ms of the DDP step of another contender.
        environ |= {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
        # DeepSpeed builds with the ninja beside its Python.
        environ["PATH"] = f"{python.parent}{os.pathsep}{environ['PATH']}"
        command = [python, Path(__file__).with_name("comm_ranks.py"), part, str(rank), str(size), vllm]
        ranks.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
    try:
        said = [process.communicate(timeout=900)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(process.returncode for process in ranks):
        sys.exit(f"a rank of {part} failed")
    told_figures: list[dict[str, Any]] = json.loads(said[0].splitlines()[-1])
    return told_figures


def show(figures: list[dict[str, Any]]) -> None:
    """Prints all times, and the geometric mean of how many times faster than a peer we are."""
    table = Table("work", "dtype", "elements", "ours, µs", "peer", "its, µs", "times faster", box=None)
    ratios: dict[tuple[str, str], list[float]] = {}
    for figure in figures:
        ours = figure["microseconds"]["acclimate"]
        peers = {name: time for name, time in figure["microseconds"].items() if name != "acclimate"}
        for peer, time in peers.items() or {"": math.nan}.items():
            row = (figure["work"], figure["dtype"], f"{figure['elements']:,}", f"{ours:.1f}", peer)
            table.add_row(*row, f"{time:.1f}", f"{time / ours:.2f}")
            ratios.setdefault((figure["work"], peer), []).append(time / ours)
    console = Console(width=130)
    console.print(table)
    for (work, peer), values in ratios.items():
        if peer:
            mean = math.exp(sum(map(math.log, values)) / len(values))
            console.print(f"{work} beside {peer}: {mean:.2f} times faster in the geometric mean")
    console.print(f"{results.machine()}; load {os.getloadavg()[0]:.1f}")


def draw(figures: list[dict[str, Any]], path: Path) -> None:
    """Times over sizes, both logarithmic."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    works = list(dict.fromkeys((figure["work"], figure["dtype"]) for figure in figures))
    works = [work for work in works if len([f for f in figures if (f["work"], f["dtype"]) == work]) > 1]
    columns = 3
    rows = -(-len(works) // columns)
    canvas, axes = pyplot.subplots(rows, columns, figsize=(4 * columns, 3 * rows), squeeze=False)
    for axis in axes.flat[len(works) :]:
        axis.set_visible(False)
    for (work, dtype), axis in zip(works, axes.flat, strict=False):
        of_work = [figure for figure in figures if (figure["work"], figure["dtype"]) == (work, dtype)]
        for name, colour in zip(of_work[0]["microseconds"], results.COLOURS, strict=False):
            sizes = [figure["elements"] for figure in of_work]
            times = [figure["microseconds"][name] for figure in of_work]
            axis.loglog(sizes, times, marker="o", label=name, color=colour)
        axis.set_title(f"{work}, {dtype}", fontsize=9)
        axis.set_xlabel("elements")
        axis.set_ylabel("µs")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    canvas.tight_layout()
    canvas.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
