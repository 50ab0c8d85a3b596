"""A step of ZeRO-Offload with DeepSpeed: on its own CPU accelerator, on ours, and with our CPUAdam too.

    python benchmarks/zero_offload.py

50 million parameters in bfloat16, ZeRO 2, the optimizer and its states on the host. Each contender is one
process that trains the same network; they take turns, a step at a time, so that other work falls on all
of them.

The batch is 4 rows, so that forward and backward are short: with the thousands of tokens of real training,
offloading is a smaller part of a step. Our accelerator sets a variable of torch for huge pages, which users
of DeepSpeed can set too: DeepSpeed with it is a contender of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import results
from peers import DEEPSPEED, ROOT, deepspeed_python
from rich.console import Console
from rich.table import Table

from acclimate.host.local_address import free_port

STEPS = 1
"""In one turn."""
STARTUP = ROOT / "src" / "acclimate" / "compat" / "deepspeed" / "startup"
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
OURS = {"ACCLIMATE_DEEPSPEED": "1", "PYTHONPATH": os.pathsep.join([str(STARTUP), str(ROOT / "src")])}
CONTENDERS: dict[str, dict[str, str]] = {
    "DeepSpeed": {HUGE_PAGES: "0"},
    "DeepSpeed, huge pages": {HUGE_PAGES: "1"},
    "on our accelerator": {**OURS, "ACCLIMATE_DEEPSPEED_OPS": "0"},
    "and our ops": {**OURS, "ACCLIMATE_DEEPSPEED_OPS": "1"},
}

# Passed as text: as a file it would import its neighbours here in the place of packages of the same names.
WORKER = """
import os, sys, time
import torch
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # DeepSpeed logs to stdout
import deepspeed
steps, port = int(sys.argv[1]), sys.argv[2]
one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
os.environ.update(one, MASTER_PORT=port)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(3536, 3536, bias=False) for _ in range(4)))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True},
    "steps_per_print": 10**9,
}
engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
x = torch.randn(4, 3536, dtype=torch.bfloat16)
adam, updating = engine.optimizer.optimizer, []
update = adam.step
def timed():
    start = time.perf_counter()
    update()
    updating.append(time.perf_counter() - start)
adam.step = timed
for line in sys.stdin:
    updating.clear()
    start = time.perf_counter()
    for _ in range(steps):
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
    step = (time.perf_counter() - start) / steps
    print(step, sum(updating) / steps, loss.item(), file=answers, flush=True)
"""


class Contender:
    """A process that trains some steps for each line that it reads, and answers with seconds."""

    def __init__(self, python: Path, environment: dict[str, str]) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            [python, "-c", WORKER, str(STEPS), str(free_port())],
            env={**os.environ, "DS_ACCELERATOR": "cpu", **environment},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def turn(self) -> tuple[float, float, float]:
        """Seconds of one step, those of Adam in it, and the loss after the last."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().split()
        if len(answer) != 3:
            self.log.seek(0)
            raise RuntimeError(f"a contender ended:\n{self.log.read()[-3000:]}")
        step, adam, loss = map(float, answer)
        return step, adam, loss

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()


Medians = dict[str, tuple[float, float, float]]
"""For each contender: the seconds of a step, those of Adam in it, and the last loss."""


def measure(rounds: int) -> Medians:
    """Lets the contenders take turns."""
    python = deepspeed_python()
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CONTENDERS}
    with ExitStack() as running:
        contenders = {}
        for name, environment in CONTENDERS.items():
            contender = contenders[name] = Contender(python, environment)
            running.callback(contender.end)
            contender.turn()  # builds what is missing; one after another, as they build in one folder
        for _ in range(rounds):
            for name, contender in contenders.items():
                taken[name].append(contender.turn())
    medians = {}
    for name, turns in taken.items():
        steps, adams, losses = zip(*turns, strict=True)
        medians[name] = statistics.median(steps), statistics.median(adams), losses[-1]
    return medians


def main() -> int:
    """Returns 1 where a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    medians = measure(parser.parse_args().rounds)
    peers, ours = list(medians)[:2], list(medians)[2:]
    goals = dict(zip(ours, (0.95, 1.15), strict=True))
    """The first is "no slower", and 5 % for what two equal processes differ by."""
    table: Any = Table(
        "step with", "seconds", "times DeepSpeed's speed", "goal", "Adam in it, seconds", "loss"
    )
    missed = 0
    for name, (step, adam, loss) in medians.items():
        ratio, goal = medians[peers[0]][0] / step, goals.get(name, 0.0)
        missed += ratio < goal
        table.add_row(name, f"{step:.3f}", f"{ratio:.2f}", f"{goal or ''}", f"{adam:.3f}", f"{loss:.6f}")
    Console().print(table)
    figures = [
        results.Figure(f"{work}, 50 M parameters, {name}", "ms", medians[name][part] * 1e3,
                       {peer: medians[peer][part] * 1e3 for peer in peers})
        for part, work in enumerate(("ZeRO-Offload step", "Adam in that step"))
        for name in ours
    ]  # fmt: skip
    results.record("zero_offload", figures, {"DeepSpeed": DEEPSPEED.partition("==")[2]})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
