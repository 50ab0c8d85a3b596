"""Ranks that are threads of one process: the collectives of a split model without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Shared:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[Any] = [None] * size


class ThreadRanks:
    def __init__(self, rank: int, size: int, shared: _Shared) -> None:
        self.rank, self.size, self.shared = rank, size, shared

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self.shared.slots[self.rank] = tensor
        self.shared.barrier.wait()
        found = [each.clone() for each in self.shared.slots]
        self.shared.barrier.wait()
        return found

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            return tensor.copy_(sum(self._exchange(tensor)))  # type: ignore[arg-type]

    def all_gather(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.stack(self._exchange(tensor))


def on_threads(size: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Runs a function as each of some ranks; returns what they return."""
    shared = _Shared(size)
    found: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = work(ThreadRanks(rank, size, shared))
        except BaseException as error:
            errors.append(error)
            shared.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return found
