"""Checks of the allocator's figures: they follow allocations, and keep the peak."""

from __future__ import annotations

from contextlib import suppress

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import MIB, exactly, is_host, require
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.memory.allocations import (
    ROUNDS,
    SLACK,
    allocation_size,
    block_size,
    fill,
    mib,
    peak_figures,
    peak_resets,
    peaks_of_statistics,
    release,
    require_figures,
    settle,
)


@check(
    "memory_allocated", "empty_cache",
    promise="memory_allocated grows by what is allocated, and falls when it is freed.",
)  # fmt: skip
def allocation_shows(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    settle(accelerator)
    size = allocation_size(accelerator)
    before = exactly(accelerator.memory_allocated(), int, "memory_allocated()")
    held = fill(accelerator, size)
    during = accelerator.memory_allocated()
    require(
        size - SLACK <= during - before <= size + SLACK,
        f"memory_allocated() grows by {mib(during - before)} when {mib(size)} are allocated",
    )
    by_index = accelerator.memory_allocated(accelerator.current_device())
    require(
        abs(by_index - during) <= SLACK,
        f"memory_allocated() is {mib(during)}, and {mib(by_index)} with the index of the same device",
    )
    del held
    release(accelerator)
    after = accelerator.memory_allocated()
    require(
        after - before <= SLACK,
        f"memory_allocated() is still {mib(after - before)} higher after {mib(size)} were freed",
    )


@check(
    "memory_allocated", "memory_reserved", "empty_cache",
    promise="Allocating and freeing repeatedly ends with as much memory in use as before.",
)  # fmt: skip
def nothing_leaks(accelerator: Accelerator) -> None:
    size = allocation_size(accelerator) // 2
    # An allocator may keep an empty block.
    figures = {
        "memory_allocated()": (accelerator.memory_allocated, 0),
        "memory_reserved()": (accelerator.memory_reserved, block_size(accelerator)),
    }
    seen: dict[str, list[int]] = {name: [] for name in figures}
    for _ in range(ROUNDS):
        held = fill(accelerator, size)
        del held
        release(accelerator)
        for name, (figure, _) in figures.items():
            seen[name].append(figure())
    for name, sizes in seen.items():
        growth = sizes[-1] - sizes[0]
        require(
            growth <= SLACK + figures[name][1],
            f"{name} grows by {mib(growth)} over {ROUNDS - 1} rounds that free everything",
        )


@check(
    "max_memory_allocated", "max_memory_reserved", "max_memory_cached", "memory_stats",
    promise="The peak includes an allocation that has been freed since.",
    timeout_s=240,
)  # fmt: skip
def peak(accelerator: Accelerator) -> str | None:
    require_figures(accelerator)
    release(accelerator)
    size = allocation_size(accelerator)
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    held = fill(accelerator, size)
    del held
    release(accelerator)
    note = None
    peaks = peaks_of_statistics(accelerator) | peak_figures(accelerator)
    for what, highest in peaks.items():
        name = what if "(" in what else f"{what}()"
        shown = exactly(highest(), int, name) - before
        if shown < size - SLACK:  # without a high-water mark, a host misses peaks between two readings
            held = fill(accelerator, size)
            highest()
            del held
            shown = highest() - before
            note = "it misses a peak between two readings, since its system keeps no high-water mark"
        require(
            shown >= size - SLACK,
            f"{name} shows only {mib(shown)} of {mib(size)} that were allocated and freed",
        )
    return note


@check(
    "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached",
    "max_memory_allocated",
    promise="Each way to reset the peaks sets them to what is in use now, and no lower.",
)  # fmt: skip
def peak_reset(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    size = allocation_size(accelerator)
    kept = fill(accelerator, size)
    for name, reset in peak_resets(accelerator).items():
        held = fill(accelerator, size)
        accelerator.max_memory_allocated()
        del held
        release(accelerator)
        reset()
        peaks = {
            "allocated": (accelerator.max_memory_allocated(), accelerator.memory_allocated()),
            "reserved": (accelerator.max_memory_reserved(), accelerator.memory_reserved()),
        }
        for what, (peak, present) in peaks.items():
            above = peak - present
            require(above <= SLACK, f"after {name}() the peak is {mib(above)} above what is {what}")
            require(-above <= SLACK, f"after {name}() the peak is {mib(-above)} below what is {what}")
    require(int(kept[-1]) == 7, "resetting the peaks changes a tensor")


@check(
    "memory_reserved", "memory_cached", "max_memory_reserved", "max_memory_cached", "max_memory_allocated",
    promise="Reserved is at least allocated, a peak is at least its figure, and the older names return "
    "the same.",
)  # fmt: skip
def figures_agree(accelerator: Accelerator) -> None:
    held = fill(accelerator, allocation_size(accelerator))
    allocated = accelerator.memory_allocated()
    reserved = exactly(accelerator.memory_reserved(), int, "memory_reserved()")
    cached = exactly(accelerator.memory_cached(), int, "memory_cached()")
    require(reserved >= allocated - SLACK, f"{mib(allocated)} are allocated and {mib(reserved)} reserved")
    require(
        abs(cached - reserved) <= SLACK,
        f"memory_cached() is {mib(cached)}, memory_reserved() {mib(reserved)}",
    )
    highest = exactly(accelerator.max_memory_allocated(), int, "max_memory_allocated()")
    require(highest >= allocated - SLACK, f"the peak is {mib(highest)} and {mib(allocated)} are allocated")
    highest = exactly(accelerator.max_memory_reserved(), int, "max_memory_reserved()")
    require(highest >= reserved - SLACK, f"the peak is {mib(highest)} and {mib(reserved)} are reserved")
    older = exactly(accelerator.max_memory_cached(), int, "max_memory_cached()")
    require(
        abs(older - highest) <= SLACK,
        f"max_memory_cached() is {mib(older)}, max_memory_reserved() {mib(highest)}",
    )
    del held


@check(
    "memory_stats", "memory_summary", "memory_allocated",
    promise="memory_stats has torch's keys, follows allocations, and agrees with memory_allocated.",
)  # fmt: skip
def statistics(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    size = allocation_size(accelerator)
    settle(accelerator)

    def current() -> int:
        found = accelerator.memory_stats()
        require(isinstance(found, dict), f"memory_stats() is a {type(found).__name__}")
        for pool in ("allocated_bytes.all", "reserved_bytes.all"):
            for key in ("current", "peak"):
                require(f"{pool}.{key}" in found, f'memory_stats() has no "{pool}.{key}"')
        return int(found["allocated_bytes.all.current"])

    before = current()
    held = fill(accelerator, size)
    during, figure = current(), accelerator.memory_allocated()
    require(
        size - SLACK <= during - before <= size + SLACK,
        f'memory_stats(): "allocated_bytes.all.current" grows by {mib(during - before)} when {mib(size)} '
        "are allocated",
    )
    require(
        abs(during - figure) <= SLACK,
        f"memory_stats() says {mib(during)}, memory_allocated() {mib(figure)}",
    )
    del held
    settle(accelerator)
    after = current()
    require(
        after - before <= SLACK,
        f'memory_stats(): "allocated_bytes.all.current" is still {mib(after - before)} higher after '
        f"{mib(size)} were freed",
    )
    text = exactly(accelerator.memory_summary(), str, "memory_summary()")
    require(bool(text.strip()), "memory_summary() is empty")


@check(
    "reset_accumulated_memory_stats", "ipc_collect", "memory_stats",
    promise="reset_accumulated_memory_stats resets the counters that only grow; ipc_collect changes no "
    "tensor.",
)  # fmt: skip
def accumulated_statistics(accelerator: Accelerator) -> None:
    held = fill(accelerator, 8 * MIB)
    accelerator.ipc_collect()
    require(int(held[-1]) == 7, "ipc_collect() changed a tensor")
    if not is_host(accelerator):  # a host may promise more memory than it has
        with suppress(accelerator.OutOfMemoryError, RuntimeError):
            fill(accelerator, 4 * accelerator.total_memory())
    before = accelerator.memory_stats()
    accelerator.reset_accumulated_memory_stats()
    after = accelerator.memory_stats()
    counted = int(after.get("allocated_bytes.all.allocated", 0))
    require(counted <= MIB, f"after the reset {mib(counted)} count as allocated since")
    for key in before:
        if key.endswith((".allocated", ".freed")) or key in ("num_alloc_retries", "num_ooms"):
            left = after.get(key, 0)
            require(
                left < before[key] or not before[key],
                f'reset_accumulated_memory_stats() leaves memory_stats()["{key}"] at {left}',
            )
