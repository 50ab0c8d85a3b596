"""Checks that memory figures are exact: small tensors show, and methods agree with memory_stats."""

from __future__ import annotations

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import NotOfferedError, is_host, require
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.memory.allocations import (
    fill,
    peak_figures,
    release,
    require_figures,
    statistics_figures,
)

_KIB = 1024
_SIZES = {
    "200 tensors of 4 KiB": [4 * _KIB] * 200,
    "a tensor of 300 KiB": [300 * _KIB],
    "a tensor of 100 bytes": [100],
    "tensors of 5, 1 and 3 MiB and 1 byte each": [(mib << 20) + 1 for mib in (5, 1, 3)],
}
"""Sizes of tensors in bytes, which are allocated together. An allocator may round each one up."""
_BESIDE = (1 << 25) + 12345
"""Bytes that are allocated before, so that figures are large numbers and no whole MiB."""


@check(
    "memory_allocated", "max_memory_allocated", "memory_reserved", "memory_cached", "max_memory_reserved",
    "max_memory_cached", "memory_stats", "reset_peak_memory_stats",
    promise="Figures are exact: small tensors show in them, and memory_stats returns the same numbers.",
)  # fmt: skip
def small_tensors_show(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    if is_host(accelerator):
        raise NotOfferedError("a host's figures are those of the whole process")
    release(accelerator)
    kept = fill(accelerator, min(_BESIDE, accelerator.available_memory() // 4))
    for what, sizes in _SIZES.items():
        release(accelerator)
        accelerator.reset_peak_memory_stats()
        occupied = sum(sizes)
        before = accelerator.memory_allocated()
        held = [fill(accelerator, size) for size in sizes]
        while_held = accelerator.memory_allocated()
        _require_equal_figures(accelerator, f"while {what} are held")
        for name, peak in peak_figures(accelerator).items():
            require(
                peak() >= while_held, f"{name}() is {peak()} when memory_allocated() is or was {while_held}"
            )
        del held
        release(accelerator)
        after = accelerator.memory_allocated()
        require(
            while_held - before >= occupied,
            f"{what} occupy {occupied} bytes, and memory_allocated() grows by {while_held - before}",
        )
        require(
            while_held - after >= occupied,
            f"{what} occupied {occupied} bytes; when they are freed, memory_allocated() falls by "
            f"{while_held - after}",
        )
        highest = accelerator.max_memory_allocated() - before
        require(
            highest >= occupied,
            f"{what} occupied {occupied} bytes; max_memory_allocated() rose by {highest}",
        )
        _require_equal_figures(accelerator, f"after {what} were freed")
    require(int(kept[-1]) == 7, "a tensor changed while figures were read")


def _require_equal_figures(accelerator: Accelerator, when: str) -> None:
    """Fails the check if two figures of the same thing differ, or less is reserved than allocated."""
    allocated = accelerator.memory_allocated()
    for name, reserved in (
        ("memory_reserved", accelerator.memory_reserved()),
        ("memory_cached", accelerator.memory_cached()),
    ):
        require(reserved >= allocated, f"{when}, {name}() is {reserved}, and memory_allocated() {allocated}")
    methods = statistics_figures(accelerator)
    found = accelerator.memory_stats()
    for key, method in methods.items():
        if key in found:
            figure = method()
            require(
                int(found[key]) == figure,
                f'{when}, memory_stats()["{key}"] is {found[key]}, and {method.__name__}() {figure}',
            )
