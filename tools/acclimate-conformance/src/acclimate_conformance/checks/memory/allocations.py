"""Functions that the checks of memory share: allocations, and the figures with their precision."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeAlias

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import MIB, NotOfferedError, require
from acclimate_conformance.checks.device_arguments import methods_of

# A host's memory statistics are those of the whole process, so the checks allocate much more than other code.
SIZE = 96 * MIB
SLACK = SIZE // 8
ROUNDS = 6
Figure: TypeAlias = Callable[..., int]
"""A method that takes a device, or none for the current one, and returns bytes."""


def fill(accelerator: Accelerator, size: int, device: str | None = None) -> torch.Tensor:
    """``size`` bytes on a device, written to, so that a host really provides them."""
    return torch.full((size,), 7, dtype=torch.uint8, device=device or accelerator.current_device_name())


def allocation_size(accelerator: Accelerator) -> int:
    """Bytes to allocate: large compared with the process's other allocations, and available."""
    return min(SIZE, accelerator.available_memory() // 4)


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
