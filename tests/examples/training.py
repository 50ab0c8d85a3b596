"""Runs examples/train_gpt.py as a user does, with a model that trains in seconds."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fresh_process import plain_environment
from ports import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_gpt.py"

# A few hundred kB of the text that is the default.
_TEXT = Path(sysconfig.get_path("stdlib")) / "email"

TINY = (
    f"--data={_TEXT}",
    "--layers=2", "--heads=2", "--width=64", "--context=64", "--batch=8", "--lr=3e-3", "--warmup=5",
    "--validate-every=10", "--checkpoint-every=10",
)  # fmt: skip
STEPS = 30

Row = dict[str, Any]

# What a run's speed or its machine changes; the rest of a row is the curve.
_NOT_THE_CURVE = ("tokens_per_s", "memory")


def environment(**more: str) -> dict[str, str]:
    """One thread, so that ranks and other tests do not wait for each other's."""
    unwanted = ("ACCLIMATE_SIM", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    plain = {name: value for name, value in plain_environment().items() if name not in unwanted}
    return {**plain, "OMP_NUM_THREADS": "1", **more}


def on_sim(profile: str) -> dict[str, str]:
    return {"ACCLIMATE_ACCELERATOR": "sim", "ACCLIMATE_SIM": profile}


def start(out: Path, *options: str, **env: str) -> subprocess.Popen[str]:
    """Starts one process of the example; its output is in ``out``'s neighbour ``….log``."""
    command = [sys.executable, str(SCRIPT), f"--out={out}", *TINY, *options]
    with log_of(out, env.get("RANK", "0")).open("a") as log:
        return subprocess.Popen(command, env=environment(**env), stdout=log, stderr=log, text=True)


def log_of(out: Path, rank: str = "0") -> Path:
    return out.with_name(f"{out.name}.{rank}.log")


def train(
    out: Path, *options: str, steps: int = STEPS, ranks: int = 1, env: Mapping[str, str] | None = None
) -> list[Row]:
    """Runs to the end, and returns the curve."""
    given = (f"--steps={steps}", *options)
    with contextlib.ExitStack() as running:
        processes = [
            running.enter_context(started) for started in start_ranks(out, *given, ranks=ranks, env=env)
        ]
        ended = [wait(process) for process in processes]
    assert ended == [0] * ranks, "\n".join(log_of(out, str(rank)).read_text() for rank in range(ranks))
    return curve(out)


def start_ranks(
    out: Path, *options: str, ranks: int, env: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    if ranks == 1:
        return [start(out, *options, **(env or {}))]
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **(env or {})}
    return [start(out, *options, **shared, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(ranks)]


def wait(process: subprocess.Popen[str], timeout_s: float = 600) -> int:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str], timeout_s: float = 600) -> None:
    """Returns once a run has done a step; fails where it ends before."""
    until = time.monotonic() + timeout_s
    while not any(row["step"] >= step for row in rows(out)):
        assert process.poll() is None, log_of(out).read_text()
        assert time.monotonic() < until, f"no step {step} after {timeout_s} s"
        time.sleep(0.02)


def rows(out: Path) -> Iterator[Row]:
    path = out / "metrics.jsonl"
    if path.exists():
        yield from (json.loads(line) for line in path.read_text().split("\n")[:-1])


def curve(out: Path) -> list[Row]:
    """What a run computed in each step: bit for bit, as JSON holds a float exactly."""
    return [{key: row[key] for key in row if key not in _NOT_THE_CURVE} for row in rows(out)]


def largest_difference(one: list[Row], other: list[Row], name: str = "loss") -> float:
    assert [row["step"] for row in one] == [row["step"] for row in other]
    return max(abs(a[name] - b[name]) for a, b in zip(one, other, strict=True))


def forget_checkpoints_after(out: Path, step: int) -> None:
    """As if the run had been killed between that checkpoint and the next."""
    for path in (out / "checkpoints").glob("step_*.pt"):
        if int(path.stem.removeprefix("step_")) > step:
            os.remove(path)
