"""Functions that the checks of memory share: allocations, and the figures with their precision."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from acclimate.accelerator import Accelerator, DeviceLike
from acclimate_conformance.checks.assertions import MIB, NotOfferedError, exactly, is_host, require
from acclimate_conformance.checks.device_arguments import methods_of

# A host's memory statistics are those of the whole process, so the checks allocate much more than other code.
SIZE = 96 * MIB
SLACK = SIZE // 8
ROUNDS = 6
MOST = 1 << 30  # bytes to allocate at most to see how an allocator reserves memory
Figure: TypeAlias = Callable[..., int]
"""A method that takes a device, or none for the current one, and returns bytes."""


def fill(accelerator: Accelerator, size: int, device: str | None = None) -> torch.Tensor:
    """``size`` bytes on a device, written to, so that a host really provides them."""
    return torch.full((size,), 7, dtype=torch.uint8, device=device or accelerator.current_device_name())


def allocation_size(accelerator: Accelerator) -> int:
    """Bytes to allocate: large compared with the process's other allocations, and available."""
    return min(SIZE, accelerator.available_memory() // 4)


def filled(accelerator: Accelerator, size: int) -> Iterator[list[torch.Tensor]]:
    """More and more tensors of a size, as long as there is room for twice as much."""
    held: list[torch.Tensor] = []
    for _ in range(max(2, min(MOST, accelerator.available_memory() // 2) // max(1, size))):
        held.append(fill(accelerator, size))
        yield held


def block_size(accelerator: Accelerator) -> int:
    """By how much an allocator's reserved memory may exceed what is needed: a block, or 0.

    An allocator may reserve blocks of any size, from which it takes tensors, and keep an empty one. 0 means
    that it reserves as much as is asked, as a host does.
    """
    if is_host(accelerator):
        return 0
    release(accelerator)
    size = allocation_size(accelerator)
    before, grown = accelerator.memory_reserved(), 0
    for held in filled(accelerator, size):
        now = accelerator.memory_reserved()
        grown, before = max(grown, now - before), now
        if grown > 0 and len(held) > 1:
            break
    held.clear()
    release(accelerator)
    return grown if grown > size + SLACK else 0


def room(accelerator: Accelerator, *device: DeviceLike) -> int:
    """Bytes that are reserved and not allocated: tensors may take them before more is reserved."""
    return max(0, accelerator.memory_reserved(*device) - accelerator.memory_allocated(*device))


def settle(accelerator: Accelerator) -> None:
    """Waits until dropped tensors are freed."""
    gc.collect()
    accelerator.synchronize()


def release(accelerator: Accelerator) -> None:
    """Waits until dropped tensors are freed, and empties the allocator's cache."""
    settle(accelerator)
    accelerator.empty_cache()


def current_figures(accelerator: Accelerator) -> dict[str, Figure]:
    """The methods that return the memory in use, by name."""
    return methods_of(accelerator, "memory_allocated", "memory_reserved", "memory_cached")


def peak_figures(accelerator: Accelerator) -> dict[str, Figure]:
    """The methods that return the peaks, by name and in the same order."""
    return methods_of(accelerator, "max_memory_allocated", "max_memory_reserved", "max_memory_cached")


def peak_resets(accelerator: Accelerator) -> dict[str, Callable[..., None]]:
    """The methods that reset peaks, by name."""
    return methods_of(
        accelerator, "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"
    )


def peaks_of_statistics(accelerator: Accelerator) -> dict[str, Figure]:
    """The peaks in memory_stats, by their name there."""

    def peak(key: str) -> Figure:
        return lambda: exactly(accelerator.memory_stats()[key], int, f'memory_stats()["{key}"]')

    keys = ("allocated_bytes.all.peak", "reserved_bytes.all.peak")
    return {f'memory_stats()["{key}"]': peak(key) for key in keys if key in accelerator.memory_stats()}


def statistics_figures(accelerator: Accelerator) -> dict[str, Figure]:
    """The methods that return the same numbers as memory_stats, by their keys there."""
    return {
        "allocated_bytes.all.current": accelerator.memory_allocated,
        "allocated_bytes.all.peak": accelerator.max_memory_allocated,
        "reserved_bytes.all.current": accelerator.memory_reserved,
        "reserved_bytes.all.peak": accelerator.max_memory_reserved,
    }


def require_figures(accelerator: Accelerator) -> None:
    """Ends the check if the allocator keeps no figures, and no method claims any."""
    held = fill(accelerator, MIB)
    if not accelerator.memory_stats() and not accelerator.memory_allocated() and held.numel():
        kept = _kept_by_torch(accelerator)
        require(not kept, f"memory_stats() is empty, but torch's has {len(kept)} figures of the device")
        raise NotOfferedError("its allocator keeps no figures, and says so: memory_stats() is empty")


def _kept_by_torch(accelerator: Accelerator) -> dict[str, object]:
    """torch's own statistics of the device's allocator; nothing if it has none."""
    current = torch.accelerator.current_accelerator()
    if current is None or current.type != accelerator.device_type:
        return {}
    try:
        return dict(torch.accelerator.memory_stats())
    except RuntimeError:  # an allocator of the vendor's that keeps none
        return {}


def mib(size: int) -> str:
    """``size`` bytes as text."""
    return f"{size / MIB:.1f} MiB"


def pass_back_many(x: torch.Tensor, count: int) -> None:
    """Makes a backward pass in which alone a result has ``count`` numbers; ``x`` has one."""

    class TooMuch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            return given * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.expand(count).neg()[:1]

    TooMuch.apply(x.clone().requires_grad_()).sum().backward()  # type: ignore[no-untyped-call]
