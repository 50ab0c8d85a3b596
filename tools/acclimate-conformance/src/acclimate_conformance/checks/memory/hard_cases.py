"""Checks of memory figures in hard cases: beyond 32 bits, with a full cache, after refusals."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate.host import topology
from acclimate_conformance.checks.assertions import MIB, NotOfferedError, is_host, require
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.memory.allocations import (
    SLACK,
    block_size,
    current_figures,
    fill,
    mib,
    peak_figures,
    release,
    require_figures,
    room,
    settle,
)
from acclimate_conformance.checks.memory.small import require_equal_figures

_LARGE = (2**32 + 64 * MIB, 2**31 + 64 * MIB)
_REFUSALS = 64
_LENGTH = 5003
_OBJECTS = 80


@check(
    "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "memory_stats",
    promise="Figures are right for more than 2 and 4 GiB.",
    once=True,
)  # fmt: skip
def figures_beyond_32_bits(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    if is_host(accelerator):
        raise NotOfferedError("memory of a host counts once it is written to, which takes long")
    release(accelerator)
    # A device whose memory is the host's may share it with others.
    most = min(accelerator.available_memory(), topology.available_memory()) // 2
    size = next((large for large in _LARGE if large <= most), 0)
    if not size:
        raise NotOfferedError("there is too little memory for an allocation of 2 GiB")
    figures = current_figures(accelerator) | peak_figures(accelerator)
    block = block_size(accelerator)
    accelerator.reset_peak_memory_stats()
    for present, highest in zip(current_figures(accelerator), peak_figures(accelerator), strict=True):
        above = figures[highest]() - figures[present]()
        require(above <= block + SLACK, f"reset_peak_memory_stats() leaves {highest}() {mib(above)} too high")
    before = {what: figure() for what, figure in figures.items()}
    spare = room(accelerator)
    held = torch.empty(size, dtype=torch.uint8, device=accelerator.current_device_name())
    figures["memory_stats"] = lambda *_: int(accelerator.memory_stats()["allocated_bytes.all.current"])
    before["memory_stats"] = before["memory_allocated"]
    for what, figure in figures.items():
        grown = figure() - before[what]
        of_pool = "cached" in what or "reserved" in what
        least, most = (size - spare, size + block) if of_pool else (size, size)
        require(least - 64 * MIB <= grown <= most + 64 * MIB, f"{mib(size)} raise {what}() by {mib(grown)}")
    require_equal_figures(accelerator, f"while {mib(size)} are held")
    del held
    release(accelerator)


@check(
    "available_memory", "mem_get_info", "memory_reserved", "total_memory", "empty_cache",
    promise="Memory that the allocator keeps after tensors are freed is reserved, not available, and given "
    "up before an allocation fails.",
)  # fmt: skip
def cache_is_not_available(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    if is_host(accelerator):
        raise NotOfferedError("a host's allocator returns freed memory to the system")
    release(accelerator)
    held = fill(accelerator, 48 * MIB)
    del held
    settle(accelerator)
    total, reserved = accelerator.total_memory(), accelerator.memory_reserved()
    available = accelerator.available_memory()
    require(
        available <= total - reserved,
        f"available_memory() is {mib(available)}, with {mib(reserved)} reserved of {mib(total)}: too much",
    )
    _require_cache_given_up(accelerator)


def _require_cache_given_up(accelerator: Accelerator) -> None:
    """Fails if an allocation is refused that there is room for once the allocator's cache is emptied."""
    release(accelerator)
    available = accelerator.available_memory()
    device = accelerator.current_device_name()

    def allocate(share: float) -> bool:
        try:
            # Not written to: where a device's memory is the host's, that would take it from others.
            held = torch.empty(int(available * share), dtype=torch.uint8, device=device)
        except Exception as error:
            if not accelerator.is_out_of_memory(error):
                raise
            return False
        del held
        settle(accelerator)
        return True

    first = 5 / 8
    if not allocate(first):
        raise NotOfferedError("less memory can be allocated in one piece than is available")
    larger = 3 / 4
    if allocate(larger):
        return
    release(accelerator)
    require(
        not allocate(larger),
        f"with {mib(int(available * first))} in its cache the allocator refuses "
        f"{mib(int(available * larger))}, for which there is room after empty_cache()",
    )


@check(
    "empty_cache", "memory_allocated",
    promise="New tensors hold the values that they are made with, in memory that others used before.",
    of="operators",
)  # fmt: skip
def used_memory_is_cleared(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    makers: dict[str, Callable[[torch.dtype], tuple[torch.Tensor, float]]] = {
        "torch.zeros": lambda d: (torch.zeros(_LENGTH, dtype=d, device=device), 0),
        "torch.zeros_like": lambda d: (torch.zeros_like(torch.empty(_LENGTH, dtype=d, device=device)), 0),
        "new_zeros": lambda d: (torch.empty(1, dtype=d, device=device).new_zeros(_LENGTH), 0),
        "zero_": lambda d: (torch.empty(_LENGTH, dtype=d, device=device).zero_(), 0),
        "torch.ones": lambda d: (torch.ones(_LENGTH, dtype=d, device=device), 1),
        "torch.full": lambda d: (torch.full((_LENGTH,), 1, dtype=d, device=device), 1),
    }
    steps: dict[str, Callable[[], None]] = {
        "a tensor was dropped": accelerator.synchronize,
        "empty_cache()": accelerator.empty_cache,
    }
    for after, step in steps.items():
        for what, make in makers.items():
            for dtype in (torch.float32, torch.int32, torch.bool):
                held = torch.full((4 * _LENGTH,), 113, dtype=torch.uint8, device=device)
                del held
                step()
                made, wanted = make(dtype)
                wrong = int((made.cpu() != wanted).sum())
                require(not wrong, f"{wrong} of {_LENGTH} numbers of {what} are wrong after {after}")


@check(
    "memory_allocated", "memory_reserved", "OutOfMemoryError", "is_out_of_memory",
    promise="Allocations that are refused again and again leave the figures exactly as they were.",
)  # fmt: skip
def refused_allocations_leave_nothing(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    if is_host(accelerator):
        raise NotOfferedError("a host's figures are those of the whole process")
    device = accelerator.current_device_name()
    size = 4 * accelerator.total_memory()
    release(accelerator)
    figures = current_figures(accelerator)
    before = {what: figure() for what, figure in figures.items()}
    for _ in range(_REFUSALS):
        with suppress(accelerator.OutOfMemoryError, RuntimeError):
            torch.empty(size, dtype=torch.uint8, device=device)
    release(accelerator)
    for what, figure in figures.items():
        left = figure() - before[what]
        require(left == 0, f"{_REFUSALS} refused allocations change {what}() by {left} bytes")


@check(
    "pin_memory", "pin_empty", "pin_empty_like", "unpin_memory", "Stream", "Event", "create_graph",
    promise="Pinned tensors, streams, events and graphs are freed with their last reference, and leave no "
    "open files or threads.",
)  # fmt: skip
def objects_die(accelerator: Accelerator) -> None:
    makers: dict[str, Callable[[], object]] = {
        "pin_memory()": lambda: accelerator.pin_memory(torch.ones(64)),
        "pin_empty()": lambda: accelerator.pin_empty(64, dtype=torch.float32),
        "pin_empty_like()": lambda: accelerator.pin_empty_like(torch.ones(64)),
        "Stream()": accelerator.Stream,
        "Event()": accelerator.Event,
    }
    if accelerator.supports_graphs:
        makers["create_graph()"] = accelerator.create_graph
    for what, make in makers.items():
        for unpinned in (False, True):
            made = make()
            if unpinned and isinstance(made, torch.Tensor):
                accelerator.unpin_memory(made)
            try:
                reference = weakref.ref(made)
            except TypeError:  # an object that cannot tell
                continue
            del made
            gc.collect()
            after = " after unpin_memory()" if unpinned else ""
            require(reference() is None, f"what {what} returned is kept{after}, though nothing uses it")
        _require_no_resources_kept(accelerator, what, make)


def _require_no_resources_kept(accelerator: Accelerator, what: str, make: Callable[[], object]) -> None:
    """Fails the check if the process has a file or a thread more for each object that it made and dropped."""

    def used() -> None:
        made: Any = make()
        if isinstance(made, torch.Tensor):
            made.fill_(1)
        elif isinstance(made, accelerator.Event):
            made.record()
            made.synchronize()
        elif isinstance(made, accelerator.Stream):
            with accelerator.stream(made):
                torch.ones(3, device=accelerator.current_device_name()).add_(1)
            made.synchronize()

    used()
    gc.collect()
    before = _resources()
    for _ in range(_OBJECTS):
        used()
    gc.collect()
    for kind, count in _resources().items():
        grown = count - before[kind]
        require(grown < _OBJECTS // 2, f"{_OBJECTS} times {what} leave {grown} {kind} in the process")


def _resources() -> dict[str, int]:
    """What Linux counts of this process; nothing elsewhere."""
    folders = {"open files": Path("/proc/self/fd"), "threads": Path("/proc/self/task")}
    return {kind: len(list(folder.iterdir())) for kind, folder in folders.items() if folder.exists()}
