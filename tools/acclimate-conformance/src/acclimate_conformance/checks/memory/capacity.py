"""Checks of a device's capacity: total and available memory, and running out of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from acclimate.accelerator import Accelerator
from acclimate.host import topology
from acclimate.imports import describe
from acclimate_conformance.checks.assertions import (
    MIB,
    BrokenPromiseError,
    NotOfferedError,
    exactly,
    is_host,
    require,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.memory.allocations import (
    ROUNDS,
    SLACK,
    allocation_size,
    fill,
    mib,
    release,
    settle,
)

_CHANCES = 12  # how often others may free as much memory as the check allocates
_FIGURES_LAG_S = 1.5  # some systems update the host's available memory only now and then
_BEYOND_ADDRESSES = 2**50  # bytes; more than a process can address: a host may promise anything less


@check(
    "total_memory", "available_memory", "mem_get_info", "get_device_properties",
    promise="Available memory is at most the total, and falls with an allocation.",
)  # fmt: skip
def capacity(accelerator: Accelerator) -> None:
    total = exactly(accelerator.total_memory(), int, "total_memory()")
    available = exactly(accelerator.available_memory(), int, "available_memory()")
    require(0 < available <= total, f"available_memory() is {mib(available)} of {mib(total)}")
    info = exactly(accelerator.mem_get_info(), tuple, "mem_get_info()")
    require(len(info) == 2, f"mem_get_info() is {info}")
    exactly(info[0], int, "free memory of mem_get_info()")
    require(
        abs(info[1] - total) <= total // 16,
        f"mem_get_info() says {mib(info[1])} in total, total_memory() {mib(total)}",
    )
    stated = accelerator.get_device_properties().total_memory
    require(
        abs(stated - total) <= total // 16,
        f"the properties say {mib(stated)} in total, total_memory() {mib(total)}",
    )
    size = min(256 * MIB, available // (2 * _CHANCES))
    kept: list[torch.Tensor] = []
    for left in reversed(range(_CHANCES)):  # others use the memory too, but hardly free as much each time
        release(accelerator)
        before = accelerator.available_memory()
        held = fill(accelerator, size)
        accelerator.synchronize()
        deadline = time.monotonic() + (0 if left else _FIGURES_LAG_S)
        now = accelerator.available_memory()
        taken = before - now
        while taken < size // 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            now = accelerator.available_memory()
            taken = max(taken, before - now)
        if taken >= size // 2:
            return
        if taken >= 0 and left >= _CHANCES // 2:
            # Linux keeps freed pages in lists, one for each processor, and does not count them as available.
            # An allocation takes these first: up to gigabytes, so the next round allocates more.
            kept.append(held)
            continue
        del held
        release(accelerator)
        # Memory that others free meanwhile lowers the first figure by as much as it raises the second.
        given = accelerator.available_memory() - now
        if (taken + given) // 2 >= size // 2:
            return
    raise BrokenPromiseError(f"available_memory() falls by {mib(taken)} when {mib(size)} are allocated")


@check(
    "available_memory", "mem_get_info", "total_memory",
    promise="A host says how much memory the system, or the limit of its container, leaves.",
)  # fmt: skip
def capacity_of_a_host(accelerator: Accelerator) -> None:
    if not is_host(accelerator):
        raise NotOfferedError("its memory is not the host's")
    figures: dict[str, Callable[[], int]] = {  # what the other rests on first
        "mem_get_info": lambda: accelerator.mem_get_info()[0],
        "available_memory": accelerator.available_memory,
    }
    for name, figure in figures.items():
        for left in reversed(range(ROUNDS)):  # others use the memory too
            told, known = figure(), topology.available_memory()
            if abs(told - known) <= known // 16 + SLACK:
                break
            require(left > 0, f"{name}() says {mib(told)}, and the system leaves {mib(known)}")
            time.sleep(0.05)


@check(
    "OutOfMemoryError", "is_out_of_memory", "memory_allocated",
    promise="is_out_of_memory recognises the error of a too large allocation, and the device still works.",
    timeout_s=240,
)  # fmt: skip
def out_of_memory(accelerator: Accelerator) -> str | None:
    kind = accelerator.OutOfMemoryError
    require(isinstance(kind, type) and issubclass(kind, RuntimeError), f"OutOfMemoryError is {kind!r}")
    settle(accelerator)
    before = accelerator.memory_allocated()
    error = _exhaust(accelerator)
    told = exactly(accelerator.is_out_of_memory(error), bool, "is_out_of_memory()")
    described = describe(error, whole=True)
    require(
        told or not isinstance(error, kind),
        f"is_out_of_memory() denies its own OutOfMemoryError: {described}",
    )
    require(
        told or not isinstance(error, torch.OutOfMemoryError),
        f"allocating too much raises {described}, of the type {_type_of(error)}; the accelerator's "
        f"OutOfMemoryError is {kind.__module__}.{kind.__qualname__}, which does not include it",
    )
    require(told, f"allocating too much raises {described}, which is_out_of_memory() does not recognise")
    made = kind("out of memory")
    require(accelerator.is_out_of_memory(made), f"is_out_of_memory() denies its own {made!r}")
    others: tuple[BaseException, ...] = (
        RuntimeError("The size of tensor a (3) must match"),
        RuntimeError("an illegal memory access was encountered"),
        RuntimeError("unsupported memory format option"),
        RuntimeError("out of resource: shared memory, required: 300000, hardware limit: 101376"),
        RuntimeError("Tensors must be in contiguous memory"),
        RuntimeError("Trying to create tensor with negative dimension -1: cannot allocate it"),
        RuntimeError("the memory that was allocated has another size"),
        RuntimeError("insufficient resources"),
        ValueError("no"),
        KeyboardInterrupt(),
    )
    for other in others:
        told = exactly(accelerator.is_out_of_memory(other), bool, "is_out_of_memory()")
        require(not told, f"is_out_of_memory() is True for {other!r}")
    of_the_host = _exhaust_the_host()
    require(
        accelerator.is_out_of_memory(of_the_host),
        f"is_out_of_memory() does not recognise the error of the host's allocator: "
        f"{describe(of_the_host, whole=True)}",
    )
    note = (
        None
        if isinstance(error, kind)
        else f"it raises a plain {type(error).__name__}, which is_out_of_memory() recognises"
    )
    del error
    settle(accelerator)
    held = accelerator.memory_allocated() - before
    require(held <= SLACK, f"{mib(held)} stay allocated after a failed allocation")
    again = fill(accelerator, allocation_size(accelerator))
    require(int(again[-1]) == 7, "after a failed allocation the next one gives wrong values")
    return note


def _exhaust_the_host() -> Exception:
    """The error of torch's allocator for the host, which programs for a device meet in copies."""
    try:
        torch.empty(_BEYOND_ADDRESSES, dtype=torch.uint8, device="cpu")
    except Exception as error:  # noqa: BLE001 - whether it is recognised is what is checked
        return error.with_traceback(None)
    raise NotOfferedError("the host allocates more than it can address")


def _type_of(error: Exception) -> str:
    return "torch.OutOfMemoryError" if type(error) is torch.OutOfMemoryError else type(error).__qualname__


def _exhaust(accelerator: Accelerator) -> Exception:
    """The error of an allocation that is too large, without the frames that hold tensors."""
    device = accelerator.current_device_name()
    for size in (2 * accelerator.total_memory(), _BEYOND_ADDRESSES):
        try:
            # Not written to: a host may promise memory that it lacks, and kill the process that writes to it.
            torch.empty(size, dtype=torch.uint8, device=device)
        except Exception as error:  # noqa: BLE001 - its type is what is checked
            return error.with_traceback(None)
    raise BrokenPromiseError(f"{_BEYOND_ADDRESSES // 2**40} TiB are allocated without an error")
