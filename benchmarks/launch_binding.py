"""What binding is worth: a CPU-bound job of 2 ranks, unbound, bound by us, and bound by numactl.

    python benchmarks/launch_binding.py [--rounds 7]

The three take turns, all started by `acclimate run`, each rank with the same number of threads. A figure
is the time that the slower of the two ranks needs for its matrix products, the median over the rounds;
the start of Python and torch is not in it. Binding should never be slower than none, and as good as
numactl's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from acclimate.host.topology import format_cpu_list, read_topology
from acclimate.launch.binding.cores import bind_ranks

RANKS = 2
NOISE = 1.03
"""Two runs of the same command differ by this much on a quiet machine."""

JOB = """
import os, sys, time
from pathlib import Path
import torch

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
left = torch.randn(768, 768)
right = torch.randn(768, 768) / 768**0.5
for _ in range(5):
    left @ right
(folder / f"ready{rank}").touch()
while len(list(folder.glob("ready*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.001)
start = time.perf_counter()
for _ in range(100):
    left = left @ right
seconds = time.perf_counter() - start
(folder / f"seconds{rank}").write_text(str(seconds))
"""

# Each rank starts numactl, which then becomes Python.
BY_NUMACTL = 'eval "exec numactl \\$NUMACTL_$LOCAL_RANK \\"\\$@\\""'


def binding_seconds(rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, for "unbound", "bound" and, where it is installed, "numactl"."""
    ways = ["unbound", "bound", *(["numactl"] if shutil.which("numactl") else [])]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch, "job.py")
        script.write_text(JOB)
        for index in track(range(rounds), "binding", console=Console(stderr=True), transient=True):
            # Nobody is always first.
            for way in ways[index % len(ways) :] + ways[: index % len(ways)]:
                folder = Path(scratch, f"{way}{index}")
                folder.mkdir()
                seconds[way].append(_time_of(way, script, folder))
    return seconds


def _time_of(way: str, script: Path, folder: Path) -> float:
    bindings = bind_ranks(read_topology(), RANKS)
    env = {**os.environ, "ACCLIMATE_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(bindings[0].cores)}
    for rank, binding in enumerate(bindings):
        memory = f"--membind={format_cpu_list(binding.memory_nodes)}" if binding.memory_nodes else ""
        env[f"NUMACTL_{rank}"] = f"--physcpubind={format_cpu_list(binding.cpus)} {memory}"
    command = [str(Path(sys.executable).with_name("acclimate")), "run", "--num_accelerators", str(RANKS)]
    job = [str(script), str(folder)]
    if way == "bound":
        command += ["--bind_cores_to_rank", *job]
    elif way == "numactl":
        command += ["--no_python", "sh", "-c", BY_NUMACTL, "sh", sys.executable, *job]
    else:
        command += job
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{ended.stdout}{ended.stderr}")
    return max(float((folder / f"seconds{rank}").read_text()) for rank in range(RANKS))


def reached(seconds: dict[str, list[float]]) -> bool:
    """Whether binding is not slower than none, nor than numactl's, but for noise."""
    figures = {way: statistics.median(times) for way, times in seconds.items()}
    return all(figures["bound"] <= NOISE * figure for figure in figures.values())


def binding_table(seconds: dict[str, list[float]]) -> Table:
    """The figures side by side, with the ratio of each to ours."""
    ours = statistics.median(seconds["bound"])
    table = Table(title="A CPU-bound job of 2 ranks: the slower rank's seconds")
    for column in ("cores", "median", "fastest", "slowest", "ratio to ours"):
        table.add_column(column, justify="left" if column == "cores" else "right")
    for way, times in seconds.items():
        median = statistics.median(times)
        spread = [f"{duration:.3f} s" for duration in (median, min(times), max(times))]
        table.add_row(way, *spread, f"{median / ours:.3f}")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the table; exits with 1 where binding is slower."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args(arguments).rounds
    if len(read_topology().usable_cores()) < RANKS:
        sys.exit(f"needs {RANKS} cores")
    seconds = binding_seconds(rounds)
    console = Console()
    console.print(binding_table(seconds))
    if "numactl" not in seconds:
        console.print("numactl is not installed (Debian: apt-get install numactl), so there is no peer")
    is_reached = reached(seconds)
    console.print(f"never slower than none, equal to numactl's: {'reached' if is_reached else 'missed'}")
    sys.exit(0 if is_reached else 1)


if __name__ == "__main__":
    main()
