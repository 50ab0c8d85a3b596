"""Checks of memory: what is allocated shows, and is given back; the peak; and when it is full."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from acclimate.accelerator import Accelerator
from acclimate.conformance.checks.assertions import (
    MIB,
    BrokenPromiseError,
    NotOfferedError,
    exactly,
    require,
    several_devices,
)
from acclimate.conformance.checks.check import check
from acclimate.conformance.checks.target import Subject
from acclimate.imports import describe

# A host's figures are the process's, in which much else goes on: what is allocated here is large beside that.
_SIZE = 96 * MIB
_SLACK = _SIZE // 8
_ROUNDS = 6
_FIGURES_LAG_S = 1.5  # some systems renew the figure of what the host has left only now and then
_BEYOND_ADDRESSES = 2**50  # bytes; more than a process can address, where a host would promise any less


def _fill(accelerator: Accelerator, size: int, device: str | None = None) -> torch.Tensor:
    """That many bytes on a device, written to, so that a host really provides them."""
    return torch.full((size,), 7, dtype=torch.uint8, device=device or accelerator.current_device_name())


def _size(accelerator: Accelerator) -> int:
    return min(_SIZE, accelerator.available_memory() // 4)


def _settle(accelerator: Accelerator) -> None:
    gc.collect()
    accelerator.synchronize()


def _require_figures(accelerator: Accelerator) -> None:
    """Ends the check where the allocator keeps no figures, and no method claims any."""
    held = _fill(accelerator, MIB)
    if not accelerator.memory_stats() and not accelerator.memory_allocated() and held.numel():
        raise NotOfferedError("its allocator keeps no figures, and says so: memory_stats() is empty")


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"


@check("memory_allocated", "empty_cache")
def allocation_shows(subject: Subject) -> None:
    """What is allocated shows in memory_allocated, and is gone from it when freed."""
    accelerator = subject.accelerator
    _require_figures(accelerator)
    _settle(accelerator)
    size = _size(accelerator)
    before = exactly(accelerator.memory_allocated(), int, "memory_allocated()")
    held = _fill(accelerator, size)
    during = accelerator.memory_allocated()
    require(
        size - _SLACK <= during - before <= size + _SLACK,
        f"memory_allocated() grows by {_mib(during - before)} when {_mib(size)} are allocated",
    )
    by_index = accelerator.memory_allocated(accelerator.current_device())
    require(abs(by_index - during) <= _SLACK, f"by index it is {_mib(by_index)}, without {_mib(during)}")
    del held
    _settle(accelerator)
    accelerator.empty_cache()
    after = accelerator.memory_allocated()
    require(
        after - before <= _SLACK,
        f"memory_allocated() is still {_mib(after - before)} higher after {_mib(size)} were freed",
    )


@check("memory_allocated", "memory_reserved", "empty_cache")
def nothing_leaks(subject: Subject) -> None:
    """Allocating and freeing again and again ends with as much memory in use as before."""
    accelerator = subject.accelerator
    size = _size(accelerator) // 2
    figures = {
        "memory_allocated()": accelerator.memory_allocated,
        "memory_reserved()": accelerator.memory_reserved,
    }
    seen: dict[str, list[int]] = {name: [] for name in figures}
    for _ in range(_ROUNDS):
        held = _fill(accelerator, size)
        del held
        _settle(accelerator)
        accelerator.empty_cache()
        for name, figure in figures.items():
            seen[name].append(figure())
    for name, sizes in seen.items():
        growth = sizes[-1] - sizes[0]
        require(
            growth <= _SLACK, f"{name} grows by {_mib(growth)} over {_ROUNDS - 1} rounds that free everything"
        )


@check("max_memory_allocated", "max_memory_reserved", "max_memory_cached", timeout_s=90)
def peak(subject: Subject) -> str | None:
    """The peak shows an allocation that has been freed since."""
    accelerator = subject.accelerator
    _require_figures(accelerator)
    _settle(accelerator)
    accelerator.empty_cache()
    size = _size(accelerator)
    peaks: dict[str, Callable[[], int]] = {
        "max_memory_allocated": accelerator.max_memory_allocated,
        "max_memory_reserved": accelerator.max_memory_reserved,
        "max_memory_cached": accelerator.max_memory_cached,
    }
    note = None
    for name, highest in peaks.items():
        accelerator.reset_peak_memory_stats()
        before = accelerator.memory_allocated()
        held = _fill(accelerator, size)
        del held
        _settle(accelerator)
        accelerator.empty_cache()
        shown = exactly(highest(), int, f"{name}()") - before
        if shown < size - _SLACK:  # a host whose kernel keeps no mark can only know what it saw at a reading
            held = _fill(accelerator, size)
            highest()
            del held
            shown = highest() - before
            note = "it misses a peak between two readings, as its system keeps no high-water mark"
        require(
            shown >= size - _SLACK,
            f"{name}() shows {_mib(shown)} of {_mib(size)} that were allocated and freed",
        )
    return note


@check(
    "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached", "max_memory_allocated"
)
def peak_reset(subject: Subject) -> None:
    """Each way to reset the peaks brings them down to what is in use now."""
    accelerator = subject.accelerator
    _require_figures(accelerator)
    size = _size(accelerator)
    resets: dict[str, Callable[[], None]] = {
        "reset_peak_memory_stats": accelerator.reset_peak_memory_stats,
        "reset_max_memory_allocated": accelerator.reset_max_memory_allocated,
        "reset_max_memory_cached": accelerator.reset_max_memory_cached,
    }
    for name, reset in resets.items():
        held = _fill(accelerator, size)
        accelerator.max_memory_allocated()
        del held
        _settle(accelerator)
        accelerator.empty_cache()
        reset()
        above = accelerator.max_memory_allocated() - accelerator.memory_allocated()
        require(above <= _SLACK, f"after {name}() the peak is {_mib(above)} above what is allocated")
        above = accelerator.max_memory_reserved() - accelerator.memory_reserved()
        require(above <= _SLACK, f"after {name}() the peak is {_mib(above)} above what is reserved")


@check("memory_reserved", "memory_cached", "max_memory_reserved", "max_memory_cached", "max_memory_allocated")
def figures_agree(subject: Subject) -> None:
    """Reserved covers allocated, a peak covers its figure, and the older names say the same."""
    accelerator = subject.accelerator
    held = _fill(accelerator, _size(accelerator))
    allocated = accelerator.memory_allocated()
    reserved = exactly(accelerator.memory_reserved(), int, "memory_reserved()")
    cached = exactly(accelerator.memory_cached(), int, "memory_cached()")
    require(reserved >= allocated - _SLACK, f"{_mib(allocated)} are allocated and {_mib(reserved)} reserved")
    require(
        abs(cached - reserved) <= _SLACK,
        f"memory_cached() is {_mib(cached)}, memory_reserved() {_mib(reserved)}",
    )
    highest = exactly(accelerator.max_memory_allocated(), int, "max_memory_allocated()")
    require(highest >= allocated - _SLACK, f"the peak is {_mib(highest)} and {_mib(allocated)} are allocated")
    highest = exactly(accelerator.max_memory_reserved(), int, "max_memory_reserved()")
    require(highest >= reserved - _SLACK, f"the peak is {_mib(highest)} and {_mib(reserved)} are reserved")
    older = exactly(accelerator.max_memory_cached(), int, "max_memory_cached()")
    require(
        abs(older - highest) <= _SLACK,
        f"max_memory_cached() is {_mib(older)}, max_memory_reserved() {_mib(highest)}",
    )
    del held


@check("memory_stats", "memory_summary", "memory_allocated")
def statistics(subject: Subject) -> None:
    """memory_stats has torch's names, rises and falls with allocations, and agrees with memory_allocated."""
    accelerator = subject.accelerator
    _require_figures(accelerator)
    size = _size(accelerator)
    _settle(accelerator)

    def current() -> int:
        found = accelerator.memory_stats()
        require(isinstance(found, dict), f"memory_stats() is a {type(found).__name__}")
        for pool in ("allocated_bytes.all", "reserved_bytes.all"):
            for key in ("current", "peak"):
                require(f"{pool}.{key}" in found, f'memory_stats() has no "{pool}.{key}"')
        return int(found["allocated_bytes.all.current"])

    before = current()
    held = _fill(accelerator, size)
    during, figure = current(), accelerator.memory_allocated()
    require(
        size - _SLACK <= during - before <= size + _SLACK,
        f'"allocated_bytes.all.current" grows by {_mib(during - before)} when {_mib(size)} are allocated',
    )
    require(
        abs(during - figure) <= _SLACK,
        f"memory_stats() says {_mib(during)}, memory_allocated() {_mib(figure)}",
    )
    del held
    _settle(accelerator)
    after = current()
    require(
        after - before <= _SLACK,
        f'"allocated_bytes.all.current" is still {_mib(after - before)} higher after {_mib(size)} were freed',
    )
    text = exactly(accelerator.memory_summary(), str, "memory_summary()")
    require(bool(text.strip()), "memory_summary() is empty")


@check("reset_accumulated_memory_stats", "ipc_collect", "memory_stats")
def accumulated_statistics(subject: Subject) -> None:
    """Counters that only grow start anew when reset, and collecting other processes' memory loses nothing."""
    accelerator = subject.accelerator
    held = _fill(accelerator, 8 * MIB)
    accelerator.ipc_collect()
    require(int(held[-1]) == 7, "ipc_collect() changed a tensor")
    accelerator.reset_accumulated_memory_stats()
    counted = int(accelerator.memory_stats().get("allocated_bytes.all.allocated", 0))
    require(counted <= MIB, f"after the reset {_mib(counted)} count as allocated since")


@check("total_memory", "available_memory", "mem_get_info", "get_device_properties")
def capacity(subject: Subject) -> None:
    """Available memory is part of the total, and an allocation takes from it."""
    accelerator = subject.accelerator
    total = exactly(accelerator.total_memory(), int, "total_memory()")
    available = exactly(accelerator.available_memory(), int, "available_memory()")
    require(0 < available <= total, f"{_mib(available)} of {_mib(total)} are available")
    info = exactly(accelerator.mem_get_info(), tuple, "mem_get_info()")
    require(len(info) == 2, f"mem_get_info() is {info}")
    exactly(info[0], int, "free memory of mem_get_info()")
    require(
        abs(info[1] - total) <= total // 16,
        f"mem_get_info() says {_mib(info[1])} in total, total_memory() {_mib(total)}",
    )
    stated = accelerator.get_device_properties().total_memory
    require(
        abs(stated - total) <= total // 16,
        f"the properties say {_mib(stated)} in total, total_memory() {_mib(total)}",
    )
    size = min(256 * MIB, available // 4)
    for _ in range(_ROUNDS):  # others use the memory too; that they free as much each time is unlikely
        _settle(accelerator)
        accelerator.empty_cache()
        before = accelerator.available_memory()
        held = _fill(accelerator, size)
        accelerator.synchronize()
        deadline = time.monotonic() + _FIGURES_LAG_S
        while True:
            taken = before - accelerator.available_memory()
            if taken >= size // 2:
                return
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        del held
    raise BrokenPromiseError(f"available_memory() falls by {_mib(taken)} when {_mib(size)} are allocated")


@check("memory_allocated", "max_memory_allocated", "memory_stats", "reset_peak_memory_stats")
def devices_are_counted_apart(subject: Subject) -> None:
    """What is allocated on one device shows in the figures of that device alone."""
    accelerator = subject.accelerator
    _require_figures(accelerator)
    names = several_devices(accelerator)
    size = _size(accelerator)
    _settle(accelerator)
    for index, name in enumerate(names):
        before = [accelerator.memory_allocated(other) for other in range(len(names))]
        for other in range(len(names)):
            accelerator.reset_peak_memory_stats(other)
        held = _fill(accelerator, size, name)
        for other, earlier in enumerate(before):
            expected = size if other == index else 0
            for what, figure in (
                ("", accelerator.memory_allocated),
                ("peak of ", accelerator.max_memory_allocated),
            ):
                grown = figure(other) - earlier
                require(
                    abs(grown - expected) <= _SLACK,
                    f"{_mib(size)} allocated on {name} raise the {what}memory of {names[other]} by "
                    f"{_mib(grown)}",
                )
        del held
        _settle(accelerator)


@check("OutOfMemoryError", "is_out_of_memory", "memory_allocated", timeout_s=120)
def out_of_memory(subject: Subject) -> str | None:
    """Too large an allocation raises what the accelerator says, and the device goes on working."""
    accelerator = subject.accelerator
    kind = accelerator.OutOfMemoryError
    require(isinstance(kind, type) and issubclass(kind, RuntimeError), f"OutOfMemoryError is {kind!r}")
    _settle(accelerator)
    before = accelerator.memory_allocated()
    error = _exhaust(accelerator)
    told = exactly(accelerator.is_out_of_memory(error), bool, "is_out_of_memory()")
    described = describe(error, whole=True)
    require(
        told or not isinstance(error, kind),
        f"is_out_of_memory() denies its own OutOfMemoryError: {described}",
    )
    require(told, f"more memory than there is raises {described}, which is no {kind.__name__}")
    for other in (RuntimeError("The size of tensor a (3) must match"), ValueError("no"), KeyboardInterrupt()):
        require(not accelerator.is_out_of_memory(other), f"is_out_of_memory() takes {other!r} for one")
    note = (
        None
        if isinstance(error, kind)
        else f"it raises a plain {type(error).__name__}, told by is_out_of_memory()"
    )
    del error
    _settle(accelerator)
    held = accelerator.memory_allocated() - before
    require(held <= _SLACK, f"{_mib(held)} stay allocated after an allocation that failed")
    again = _fill(accelerator, _size(accelerator))
    require(int(again[-1]) == 7, "after an allocation that failed the next one gives wrong values")
    return note


def _exhaust(accelerator: Accelerator) -> Exception:
    """What asking for more memory than there is raises, without the frames that hold tensors."""
    device = accelerator.current_device_name()
    for size in (2 * accelerator.total_memory(), _BEYOND_ADDRESSES):
        try:
            # Not written to: a host may promise memory that it does not have, and would end this process.
            torch.empty(size, dtype=torch.uint8, device=device)
        except Exception as error:  # noqa: BLE001 - which type it is, is what is looked at
            return error.with_traceback(None)
    raise BrokenPromiseError(f"{_BEYOND_ADDRESSES // 2**40} TiB are allocated without an error")
