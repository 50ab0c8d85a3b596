"""Checks that figures of memory agree: with each other, with what was allocated, and in type."""

from __future__ import annotations

import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    MIB,
    BrokenPromiseError,
    NotOfferedError,
    equal,
    exactly,
    is_host,
    require,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.children import Child
from acclimate_conformance.checks.device_arguments import methods_of
from acclimate_conformance.checks.memory.allocations import (
    MOST,
    SLACK,
    Figure,
    allocation_size,
    block_size,
    fill,
    filled,
    mib,
    peak_figures,
    peaks_of_statistics,
    release,
    require_figures,
    room,
    settle,
    statistics_figures,
)
from acclimate_conformance.checks.target import Subject, load


@check(
    "memory_reserved", "memory_cached", "max_memory_reserved", "empty_cache",
    promise="Reserved memory grows as tensors need it, in blocks of any size; empty_cache returns it, and "
    "lowers no peak.",
)  # fmt: skip
def reserved_follows_allocations(accelerator: Accelerator) -> str | None:
    require_figures(accelerator)
    release(accelerator)
    size = allocation_size(accelerator)
    figures = methods_of(accelerator, "memory_reserved", "memory_cached")
    kept = fill(accelerator, MIB)
    before = {what: exactly(figure(), int, f"{what}()") for what, figure in figures.items()}
    # An allocator that takes tensors from blocks may have room in those that it has.
    spare = 0 if is_host(accelerator) else room(accelerator)
    steps: list[int] = []
    grown = dict.fromkeys(figures, 0)
    for held in filled(accelerator, size):
        for what, figure in figures.items():
            more = figure() - before[what] - grown[what]
            unused = grown[what] - size * (len(held) - 1)
            require(
                more <= SLACK or unused < size,
                f"{what}() grows by {mib(more)} when {mib(size)} are allocated, though {mib(unused)} of what "
                "it has grown by before are unused",
            )
            grown[what] += more
            require(
                grown[what] >= size * len(held) - spare - SLACK,
                f"{what}() grows by {mib(grown[what])} when {mib(size * len(held))} are allocated, "
                f"and {mib(spare)} were unused before",
            )
        steps += [more] if more > SLACK else []
        if len(steps) > 1:
            break
    held.clear()
    release(accelerator)
    block = max(steps, default=0)
    may_stay = block if block > size + SLACK else 0  # an allocator may keep an empty block
    for what, figure in figures.items():
        left = figure() - before[what]
        require(
            left <= SLACK + may_stay,
            f"after empty_cache() {what}() is {mib(left)} above what it was before",
        )
    require(equal(kept, torch.full((MIB,), 7, dtype=torch.uint8)), "empty_cache() changes a tensor")
    _require_peaks_stay(accelerator, size)
    return None if steps else f"{mib(spare)} were reserved before, more than the check allocates"


def _require_peaks_stay(accelerator: Accelerator, size: int) -> None:
    """Only a reset lowers a peak."""
    held = fill(accelerator, size)
    before = {what: peak() for what, peak in peak_figures(accelerator).items()}
    del held
    settle(accelerator)
    for what, peak in peak_figures(accelerator).items():
        before[what] = max(before[what], peak())
    accelerator.empty_cache()
    for what, peak in peak_figures(accelerator).items():
        fallen = before[what] - peak()
        require(fallen <= SLACK, f"empty_cache() lowers the peak of {what} by {mib(fallen)}")


@check(
    "max_memory_allocated", "max_memory_reserved", "max_memory_cached", "memory_stats",
    "reset_peak_memory_stats",
    promise="The peak is the most memory in use at one time, not the sum of all allocations, nor the last.",
)  # fmt: skip
def peak_is_the_highest(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    size = allocation_size(accelerator)
    release(accelerator)
    accelerator.reset_peak_memory_stats()
    # What others rest on comes first, so that a failure names what is at fault.
    peaks = peaks_of_statistics(accelerator) | peak_figures(accelerator)
    allocated: list[int] = []
    reserved: list[int] = []
    for part in (size, size // 2, size // 4):
        held = fill(accelerator, part)
        for peak in peaks.values():
            peak()  # without a high-water mark, the peak is the largest reading
        allocated.append(accelerator.memory_allocated())
        reserved.append(accelerator.memory_reserved())
        del held
        release(accelerator)
    for what, peak in peaks.items():
        figure, readings = ("allocated", allocated) if "allocated" in what else ("reserved", reserved)
        name = what if "(" in what else f"{what}()"
        above = peak() - max(readings)
        require(
            -SLACK <= above <= 2 * SLACK,
            f"{name} is {mib(abs(above))} {'above' if above > 0 else 'below'} the most that was {figure}, "
            f"while {mib(size)}, a half and a quarter of it were allocated in turn",
        )


@check(
    "memory_stats", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_allocated",
    promise="memory_stats and the methods return the same numbers, and no peak is below its figure.",
)  # fmt: skip
def statistics_agree(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    release(accelerator)
    accelerator.reset_peak_memory_stats()
    size = allocation_size(accelerator)
    held = fill(accelerator, size)
    half = fill(accelerator, size // 2)
    del held
    settle(accelerator)
    methods = statistics_figures(accelerator)
    now = accelerator.memory_allocated()
    above = accelerator.max_memory_allocated() - now
    require(
        above >= size - SLACK - size // 8,
        f"max_memory_allocated() is {mib(above)} above memory_allocated() after {mib(size)} were freed: it "
        "missed the peak",
    )
    found = accelerator.memory_stats()
    _require_equal(found, methods)
    for pool in ("allocated_bytes.all", "reserved_bytes.all"):
        current, peak = int(found[f"{pool}.current"]), int(found[f"{pool}.peak"])
        require(peak >= current - SLACK, f'"{pool}.peak" is {mib(peak)} and "{pool}.current" {mib(current)}')
    highest = int(found["allocated_bytes.all.peak"]) - int(found["allocated_bytes.all.current"])
    require(
        highest >= size - SLACK - size // 8,
        f'memory_stats(): "allocated_bytes.all.peak" is {mib(highest)} above what is allocated, after '
        f"{mib(size)} were freed",
    )
    for name, value in found.items():
        require(isinstance(name, str), f"memory_stats() has the key {name!r}, which is not a str")
        # torch's caching allocators set this limit to -1 if there is none.
        negative = isinstance(value, int) and value < 0 and name != "max_split_size"
        require(not negative, f'memory_stats()["{name}"] is {value}')
    require(int(half[0]) == 7, "a tensor changed while statistics were read")
    # What was freed may still be reserved: then the peaks of the two differ.
    accelerator.reset_peak_memory_stats()
    _require_equal(accelerator.memory_stats(), methods)
    found.clear()
    require(bool(accelerator.memory_stats()), "changing what memory_stats() returned changes its next result")


def _require_equal(found: dict[str, Any], methods: dict[str, Figure]) -> None:
    for name, method in methods.items():
        figure = method()
        require(
            abs(int(found[name]) - figure) <= SLACK,
            f'memory_stats()["{name}"] is {mib(int(found[name]))}, {method.__name__}() {mib(figure)}',
        )


@check(
    "memory_summary",
    promise="memory_summary returns a text that changes with the figures, shorter if abbreviated.",
)  # fmt: skip
def summary(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    texts = []
    for abbreviated in (False, True):
        before = exactly(accelerator.memory_summary(None, abbreviated), str, "memory_summary()")
        require(bool(before.strip()), "memory_summary() is empty")
        held = fill(accelerator, allocation_size(accelerator))
        after = accelerator.memory_summary(abbreviated=abbreviated)
        require(after != before, "memory_summary() is the same before and after a large allocation")
        require(any(sign.isdigit() for sign in after), "memory_summary() has no number in it")
        texts.append(after)
        _require_amount(accelerator, after)
        del held
        _require_peaks_show(accelerator, abbreviated)
    require(len(texts[1]) <= len(texts[0]) + 80, "memory_summary(abbreviated=True) is longer than the whole")


_AMOUNT = re.compile(r"([\d,]+(?:\.\d+)?) ?([KMGT]?)i?B\b")


def _require_amount(accelerator: Accelerator, text: str) -> None:
    """Fails the check if a text has amounts with their units, and none of them is what is allocated."""
    told = [
        float(number.replace(",", "")) * 1024 ** " KMGT".index(unit or " ")
        for number, unit in _AMOUNT.findall(text)
    ]
    allocated = accelerator.memory_allocated()
    near = [amount for amount in told if abs(amount - allocated) <= allocated / 16 + SLACK]
    require(
        bool(near) or not told,
        f"memory_summary() has {len(told)} amounts, none of which is memory_allocated(), {mib(allocated)}",
    )


def _require_peaks_show(accelerator: Accelerator, abbreviated: bool) -> None:
    """Fails the check if the text is the same with and without a peak above what is in use."""
    release(accelerator)
    high = accelerator.memory_summary(None, abbreviated)
    accelerator.reset_peak_memory_stats()
    low = accelerator.memory_summary(None, abbreviated)
    require(
        high != low or accelerator.max_memory_allocated() > accelerator.memory_allocated() + SLACK,
        "memory_summary() is the same before and after reset_peak_memory_stats() with a large peak",
    )


@check(
    "total_memory", "mem_get_info", "available_memory", "get_device_properties",
    promise="Allocations do not change the total memory, and mem_get_info agrees with available_memory.",
)  # fmt: skip
def capacity_agrees(accelerator: Accelerator) -> None:
    total = accelerator.total_memory()
    stated = accelerator.get_device_properties().total_memory
    info_total = accelerator.mem_get_info()[1]
    size = min(2 * allocation_size(accelerator), total // 4)
    held = fill(accelerator, size)
    free, now = accelerator.mem_get_info()
    exactly(now, int, "the total of mem_get_info()")
    require(free <= now, f"mem_get_info() says that {mib(free)} of {mib(now)} are free")
    require(
        free <= now - size // 2,
        f"mem_get_info() says that {mib(free)} of {mib(now)} are free while {mib(size)} are held",
    )
    require(now == info_total, f"the total of mem_get_info() changes from {mib(info_total)} to {mib(now)}")
    moved = accelerator.total_memory() - total
    require(moved == 0, f"total_memory() changes by {mib(moved)} when {mib(size)} are allocated")
    moved = accelerator.get_device_properties().total_memory - stated
    require(
        moved == 0,
        f"get_device_properties().total_memory changes by {mib(moved)} when {mib(size)} are allocated",
    )
    differences = []
    for _ in range(5):  # others use the memory too
        differences.append(abs(accelerator.available_memory() - accelerator.mem_get_info()[0]))
    require(
        min(differences) <= max(SLACK, total // 64),
        f"available_memory() and the free memory of mem_get_info() are {mib(min(differences))} apart",
    )
    require(int(held[-1]) == 7, "a tensor changed while figures were read")


@check(
    "reset_accumulated_memory_stats", "reset_peak_memory_stats", "memory_stats",
    promise="A reset changes only its own figures: not the allocated memory, nor the figures of the "
    "other reset.",
)  # fmt: skip
def resets_keep_to_their_figures(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    if "allocated_bytes.all.allocated" not in accelerator.memory_stats():
        raise NotOfferedError("its allocator has no counters that only grow")
    size = allocation_size(accelerator)

    def figure(name: str) -> int:
        return int(accelerator.memory_stats()[f"allocated_bytes.all.{name}"])

    accelerator.reset_peak_memory_stats()
    accelerator.reset_accumulated_memory_stats()
    held = fill(accelerator, size)
    counted = figure("allocated")
    require(counted >= size - SLACK, f"{mib(size)} were allocated, and {mib(counted)} count as allocated")
    del held
    settle(accelerator)
    current, peak = figure("current"), figure("peak")
    counts_freed = "allocated_bytes.all.freed" in accelerator.memory_stats()
    if counts_freed:
        freed = figure("freed")
        require(
            freed >= size - SLACK, f"{mib(size)} were freed, and memory_stats() counts {mib(freed)} as freed"
        )
    accelerator.reset_accumulated_memory_stats()
    for name in ("allocated", "freed") if counts_freed else ("allocated",):
        require(figure(name) <= SLACK, f"after the reset {mib(figure(name))} count as {name}")
    require(figure("current") == current, "reset_accumulated_memory_stats() changes what is allocated now")
    require(figure("peak") == peak, "reset_accumulated_memory_stats() changes the peak")
    held = fill(accelerator, size)
    current = figure("current")
    accelerator.reset_peak_memory_stats()
    require(figure("current") == current, "reset_peak_memory_stats() changes what is allocated now")
    counted = figure("allocated")
    require(
        counted >= size - SLACK, f"reset_peak_memory_stats() leaves {mib(counted)} of {mib(size)} counted"
    )
    del held


@check(
    "memory_reserved", "max_memory_reserved", "memory_cached", "max_memory_cached", "max_memory_allocated",
    "reset_peak_memory_stats", "memory_stats", "memory_allocated",
    promise="While freed memory stays cached, figures of the pool and of tensors differ, and so do their "
    "peaks.",
)  # fmt: skip
def pool_and_tensors_differ(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    if is_host(accelerator):
        raise NotOfferedError("a host's allocator keeps no cache of its own")
    block = block_size(accelerator)
    size = max(allocation_size(accelerator), block) // MIB * MIB
    if size > min(MOST, accelerator.available_memory() // 3):
        raise NotOfferedError(f"its allocator's blocks of {mib(block)} are too large for this check")
    release(accelerator)
    accelerator.reset_peak_memory_stats()
    base = _Base(
        {what: figure() for what, figure in _pool_figures(accelerator).items()}, room(accelerator), block
    )
    held, part = fill(accelerator, size), fill(accelerator, size // 4)
    _require_figures(accelerator, base, "with both tensors held", (size + size // 4,) * 8)
    reserved = accelerator.memory_reserved()
    del held
    settle(accelerator)
    if accelerator.memory_reserved() < reserved:
        raise NotOfferedError("its allocator returns freed memory at once")
    whole, rest = size + size // 4, size // 4
    _require_figures(accelerator, base, "after the larger was freed", (rest, whole) * 2 + (whole,) * 4)
    accelerator.reset_peak_memory_stats()
    _require_figures(accelerator, base, "after the peaks were reset", (rest, rest) * 2 + (whole,) * 4)
    again = fill(accelerator, size // 2)  # of the cache
    more = rest + size // 2
    _require_figures(accelerator, base, "with half of it used again", (more, more) * 2 + (whole,) * 4)
    del again
    release(accelerator)
    _require_figures(
        accelerator, base, "after the cache was emptied", (rest, more) * 2 + (rest, whole, rest, whole)
    )
    require(int(part[-1]) == 7, "empty_cache() changes a tensor")


@dataclass(frozen=True)
class _Base:
    """The state of an allocator before a check's tensors."""

    figures: dict[str, int]
    room: int
    """Bytes that were reserved and not allocated."""
    block: int
    """By how much the allocator may reserve more than is needed."""


def _pool_figures(accelerator: Accelerator) -> dict[str, Figure]:
    """In turn a figure and its peak: of tensors, and of the pool."""

    def stats(name: str) -> Figure:
        return lambda: int(accelerator.memory_stats()[name])

    return {
        "memory_allocated": accelerator.memory_allocated,
        "max_memory_allocated": accelerator.max_memory_allocated,
        'memory_stats()["allocated_bytes.all.current"]': stats("allocated_bytes.all.current"),
        'memory_stats()["allocated_bytes.all.peak"]': stats("allocated_bytes.all.peak"),
        "memory_reserved": accelerator.memory_reserved,
        "max_memory_reserved": accelerator.max_memory_reserved,
        "memory_cached": accelerator.memory_cached,
        "max_memory_cached": accelerator.max_memory_cached,
    }


def _require_figures(accelerator: Accelerator, base: _Base, when: str, wanted: tuple[int, ...]) -> None:
    slack = 4 * MIB  # an allocator reserves in larger pieces
    for (what, figure), above in zip(_pool_figures(accelerator).items(), wanted, strict=True):
        name = what if "(" in what else f"{what}()"
        of_pool = "cached" in what or "reserved" in what
        found = figure() - base.figures["memory_reserved" if of_pool else "memory_allocated"]
        spare, block = (base.room, base.block) if of_pool else (0, 0)
        require(
            above - spare - slack <= found <= above + block + slack + above // 8,
            f"{name} is {mib(found)} above the start {when}, not {mib(above)}",
        )


@check(
    "available_memory", "mem_get_info", "memory_allocated", "memory_reserved",
    promise="Memory that another process allocates is not available here, and not counted as this one's.",
    timeout_s=240, once=True,
)  # fmt: skip
def other_processes_count(subject: Subject) -> str | None:
    accelerator = subject.accelerator
    release(accelerator)
    size = min(768 * MIB, accelerator.available_memory() // 8)
    falls: list[int] = []
    for _ in range(3):
        own = accelerator.memory_allocated(), accelerator.memory_reserved()
        with tempfile.TemporaryDirectory() as folder:
            child = Child(f"{__name__}:hold", subject.source, {"size": size, "folder": folder})
            try:
                _wait_for(Path(folder) / "ready", child)
                before = accelerator.available_memory(), accelerator.mem_get_info()[0]
                (Path(folder) / "go").touch()
                _wait_for(Path(folder) / "holds", child)
                now = accelerator.available_memory(), accelerator.mem_get_info()[0]
                grown = accelerator.memory_allocated() - own[0], accelerator.memory_reserved() - own[1]
            finally:
                child.stop()
        after = accelerator.available_memory(), accelerator.mem_get_info()[0]
        for name, more in zip(("memory_allocated", "memory_reserved"), grown, strict=True):
            require(
                more <= SLACK, f"{name}() grows by {mib(more)} when another process allocates {mib(size)}"
            )
        # Memory that others free meanwhile lowers the fall by as much as the rise when the process ends.
        falls = [max(b, (b + a) // 2) - n for b, n, a in zip(before, now, after, strict=True)]
        if min(falls) >= size // 2:
            return None
        if not is_host(accelerator) and max(falls) <= SLACK:
            return "another process has a device of its own here, so its memory cannot be observed"
    # available_memory rests on mem_get_info.
    name = "mem_get_info" if falls[1] < size // 2 else "available_memory"
    fall = falls[name == "mem_get_info"]
    raise BrokenPromiseError(f"{name}() falls by {mib(fall)} when another process allocates {mib(size)}")


def _wait_for(mark: Path, child: Child) -> None:
    deadline = time.monotonic() + 100
    while not mark.exists():
        require(time.monotonic() < deadline, "a child process does not allocate memory")
        if child.ended():
            child.result()
        time.sleep(0.02)


def hold(source: str, size: int, folder: str) -> None:
    """Allocates memory when it is told to, and keeps it until this process is ended."""
    accelerator = load(source).accelerator
    fill(accelerator, MIB)
    accelerator.synchronize()
    (Path(folder) / "ready").touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.02)
    held = fill(accelerator, size)
    accelerator.synchronize()
    (Path(folder) / "holds").touch()
    time.sleep(100)
    del held
