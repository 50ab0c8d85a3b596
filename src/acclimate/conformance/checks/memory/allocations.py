"""What checks of memory allocate, and how exactly its figures can be read."""

from __future__ import annotations

import gc

import torch

from acclimate.accelerator import Accelerator
from acclimate.conformance.checks.assertions import MIB, NotOfferedError, require

# A host's figures are the process's, in which much else goes on: what is allocated here is large beside that.
SIZE = 96 * MIB
SLACK = SIZE // 8
ROUNDS = 6


def fill(accelerator: Accelerator, size: int, device: str | None = None) -> torch.Tensor:
    """That many bytes on a device, written to, so that a host really provides them."""
    return torch.full((size,), 7, dtype=torch.uint8, device=device or accelerator.current_device_name())


def allocation_size(accelerator: Accelerator) -> int:
    """Bytes that stand out of what else goes on, and fit."""
    return min(SIZE, accelerator.available_memory() // 4)


def settle(accelerator: Accelerator) -> None:
    """Waits until what was dropped is freed."""
    gc.collect()
    accelerator.synchronize()


def require_figures(accelerator: Accelerator) -> None:
    """Ends the check where the allocator keeps no figures, and no method claims any."""
    held = fill(accelerator, MIB)
    if not accelerator.memory_stats() and not accelerator.memory_allocated() and held.numel():
        kept = _kept_by_torch(accelerator)
        require(not kept, f"memory_stats() is empty, and torch's has {len(kept)} figures of the device")
        raise NotOfferedError("its allocator keeps no figures, and says so: memory_stats() is empty")


def _kept_by_torch(accelerator: Accelerator) -> dict[str, object]:
    """What torch itself says of the device's allocator; nothing where it cannot be asked."""
    current = torch.accelerator.current_accelerator()
    if current is None or current.type != accelerator.device_type:
        return {}
    try:
        return dict(torch.accelerator.memory_stats())
    except RuntimeError:  # an allocator of the vendor's that keeps none
        return {}


def mib(size: int) -> str:
    """``size`` bytes for a person."""
    return f"{size / MIB:.1f} MiB"
