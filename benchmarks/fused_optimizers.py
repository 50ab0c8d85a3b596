"""Optimizers of acclimate.ops beside torch's own on this accelerator's device, in turns.

    python benchmarks/fused_optimizers.py

Milliseconds for a step over 24 matrices of 2,048 x 2,048 and 48 vectors in float32, 100.8 million parameters:
the median of some rounds, and how long the host is busy with it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from acclimate import get_accelerator
from acclimate.ops import FusedAdam, FusedLamb, FusedLion

SHAPES = [(2048, 2048)] * 24 + [(2048,)] * 48
CONTESTANTS: dict[str, Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "FusedAdam": FusedAdam,
    "torch AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "torch AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "FusedLion": FusedLion,
    "FusedLamb": FusedLamb,
}


class Contestant:
    """An optimizer with parameters of its own."""

    def __init__(self, make: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer], device: str):
        parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in SHAPES]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        self._optimizer: Any = make(parameters)
        for _ in range(5):
            self._optimizer.step()

    def measure(self, steps: int) -> tuple[float, float]:
        """Returns milliseconds of a step, and those of the host."""
        accelerator = get_accelerator()
        accelerator.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            self._optimizer.step()
        queued = time.perf_counter()
        accelerator.synchronize()
        return (time.perf_counter() - begin) / steps * 1e3, (queued - begin) / steps * 1e3


def main() -> int:
    """Measures, and prints a line for each optimizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    accelerator = get_accelerator()
    sys.stdout.write(f"{accelerator.get_device_name()}, torch {torch.__version__}\n")
    entered = {
        name: Contestant(make, accelerator.current_device_name()) for name, make in CONTESTANTS.items()
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in entered}
    for _ in range(args.rounds):
        for name, contestant in entered.items():
            found[name].append(contestant.measure(args.steps))
    for name, rounds in found.items():
        of_device, of_host = (statistics.median(figures) for figures in zip(*rounds, strict=True))
        sys.stdout.write(f"{name:22} {of_device:8.3f} ms, host {of_host:.3f} ms\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
