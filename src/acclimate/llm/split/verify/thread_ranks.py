"""Ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TIMEOUT_S = 300.0


class ThreadRanks:
    """One rank's view of ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list[Tensor | None]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._slots = barrier, slots

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the ranks, in place, and returns it."""
        with torch.no_grad():
            return tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns each rank's tensor, stacked along a new first dimension."""
        with torch.no_grad():
            return torch.stack(self._exchange(tensor))

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._slots[self.rank] = tensor
        self._barrier.wait()
        found = [slot.clone() for slot in self._slots if slot is not None]
        self._barrier.wait()
        return found


def on_threads(size: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Runs a function on each of ``size`` thread ranks; returns the results, or raises the first error."""
    barrier = threading.Barrier(size, timeout=TIMEOUT_S)
    slots: list[Tensor | None] = [None] * size
    found: list[Any] = [None] * size
    errors: list[BaseException] = []
    grad = torch.is_grad_enabled()

    def run(rank: int) -> None:
        try:
            with torch.set_grad_enabled(grad):
                found[rank] = work(ThreadRanks(rank, size, barrier, slots))
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return found
