"""What a launcher costs, and how fast it ends a job: beside torchrun and DeepSpeed's, in one run.

    python benchmarks/launch.py [--rounds 5]

The three take turns; a figure is the median over the rounds. *Start* is 2 ranks of a script that does
nothing, over the time that Python needs for that script alone. *End* is from the SIGKILL of one of 8 ranks
until the launcher has ended and no process of the job is left; the other ranks end on SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import results
from peers import DEEPSPEED, deepspeed_python
from rich.console import Console
from rich.progress import track
from rich.table import Table

START_LIMIT_S = 0.5
END_LIMIT_S = 2.0
GIVE_UP_S = 120.0
MARK = "ACCLIMATE_BENCHMARK_MARK"

RANK = """
import os, time
from pathlib import Path
mark = Path(os.environ["FOLDER"], os.environ["RANK"])
mark.with_suffix(".new").write_text(str(os.getpid()))
mark.with_suffix(".new").rename(mark)
time.sleep(600)
"""


def launchers(peer: Path) -> dict[str, list[str]]:
    """The command of each before the script, but for the number of ranks."""
    beside = Path(sys.executable).parent
    return {
        "acclimate": [str(beside / "acclimate"), "run", "--num_accelerators"],
        "torchrun": [str(beside / "torchrun"), "--nproc-per-node"],
        "DeepSpeed": [str(peer.parent / "deepspeed"), "--num_accelerators"],
    }


def environment(peer: Path, **variables: str) -> dict[str, str]:
    # DeepSpeed starts its own script from PATH.
    path = os.pathsep.join([str(peer.parent), os.environ["PATH"]])
    return {**os.environ, "DS_ACCELERATOR": "cpu", "PATH": path, **variables}


def time_of(command: list[str], env: dict[str, str]) -> float:
    start = time.perf_counter()
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{ended.stdout}{ended.stderr}")
    return time.perf_counter() - start


def time_to_end(command: list[str], folder: Path, env: dict[str, str]) -> float:
    """Kills rank 5 of 8; seconds until nothing is left."""
    mark = folder.name
    env = {**env, "FOLDER": str(folder), MARK: mark}
    job = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: all((folder / str(rank)).exists() for rank in range(8)), "8 ranks")
        start = time.perf_counter()
        os.kill(int((folder / "5").read_text()), signal.SIGKILL)
        job.wait(GIVE_UP_S)
        wait_for(lambda: not living(mark), "no process")
        return time.perf_counter() - start
    finally:
        for pid in living(mark):
            os.kill(pid, signal.SIGKILL)
        job.wait()


def wait_for(condition: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + GIVE_UP_S
    while not condition():
        if time.monotonic() > give_up:
            sys.exit(f"waited in vain for {what}")
        time.sleep(0.005)


def living(mark: str) -> list[int]:
    """Processes whose environment holds the mark; the kernel shows none of a zombie's."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"{MARK}={mark}".encode() in Path(f"/proc/{name}/environ").read_bytes():
                found.append(int(name))
        except OSError:  # it ended meanwhile
            continue
    return found


def main() -> None:
    """Measures and prints the table; exits with 1 where a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    peer = deepspeed_python()
    names = launchers(peer)
    alone: list[float] = []
    starts: dict[str, list[float]] = {name: [] for name in names}
    ends: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        nothing, rank = Path(scratch, "nothing.py"), Path(scratch, "rank.py")
        nothing.write_text("pass\n")
        rank.write_text(RANK)
        for index in track(range(rounds), "rounds", console=Console(stderr=True), transient=True):
            env = environment(peer)
            alone.append(time_of([sys.executable, str(nothing)], env))
            for name, command in names.items():
                starts[name].append(time_of([*command, "2", str(nothing)], env))
                folder = Path(scratch, f"{name}-{index}")
                folder.mkdir()
                ends[name].append(time_to_end([*command, "8", str(rank)], folder, env))

    script = statistics.median(alone)
    over = {name: statistics.median(times) - script for name, times in starts.items()}
    until = {name: statistics.median(times) for name, times in ends.items()}
    kept = [
        results.Figure(
            work, "s", figures["acclimate"], {name: figures[name] for name in ("torchrun", "DeepSpeed")}
        )
        for work, figures in (("start 2 ranks", over), ("end 8 ranks after SIGKILL of one", until))
    ]
    results.record("launch", kept, {"DeepSpeed": DEEPSPEED.partition("==")[2]})
    table = Table(title="Launchers (DeepSpeed 0.19.8, torchrun of the same torch as ours)")
    for column in ("work", *names, "torchrun / ours", "DeepSpeed / ours", "goal"):
        table.add_column(column, justify="left" if column == "work" else "right")
    for work, figures, limit in (
        (f"start 2 ranks, over {script * 1e3:.0f} ms of Python alone", over, START_LIMIT_S),
        ("end 8 ranks after SIGKILL of one", until, END_LIMIT_S),
    ):
        ours = figures["acclimate"]
        ratios = [f"{figures[name] / ours:.1f}" for name in ("torchrun", "DeepSpeed")]
        reached = "reached" if ours <= limit else "missed"
        seconds = [f"{figures[name]:.2f} s" for name in names]
        table.add_row(work, *seconds, *ratios, f"≤ {limit:g} s: {reached}")
    Console(width=140 if not sys.stdout.isatty() else None).print(table)
    sys.exit(int(over["acclimate"] > START_LIMIT_S or until["acclimate"] > END_LIMIT_S))


if __name__ == "__main__":
    main()
