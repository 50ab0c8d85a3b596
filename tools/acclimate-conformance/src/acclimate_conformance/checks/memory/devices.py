"""Checks of memory by device: figures and resets apply to the device that is named."""

from __future__ import annotations

import time

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    MIB,
    BrokenPromiseError,
    device_names,
    require,
    several_devices,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.device_arguments import methods_of, require_device_arguments, ways_to_name
from acclimate_conformance.checks.memory.allocations import (
    ROUNDS,
    SLACK,
    Figure,
    allocation_size,
    block_size,
    current_figures,
    fill,
    mib,
    peak_figures,
    peak_resets,
    release,
    require_figures,
    room,
    settle,
)

_LAG_S = 1.0  # some devices update their available memory only now and then
_COUNTERS = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current",
             "reserved_bytes.all.peak")  # fmt: skip


def _all_figures(accelerator: Accelerator) -> dict[str, Figure]:
    def of_statistics(name: str) -> Figure:
        return lambda *device: int(accelerator.memory_stats(*device)[name])

    figures = current_figures(accelerator) | peak_figures(accelerator)
    return figures | {f'memory_stats()["{name}"]': of_statistics(name) for name in _COUNTERS}


_WITH_DEVICE = (
    "memory_allocated", "max_memory_allocated", "reset_max_memory_allocated", "memory_reserved",
    "max_memory_reserved", "memory_cached", "max_memory_cached", "reset_max_memory_cached",
    "reset_peak_memory_stats", "reset_accumulated_memory_stats", "memory_stats", "memory_summary",
    "mem_get_info", "total_memory", "available_memory",
)  # fmt: skip


@check(
    *_WITH_DEVICE,
    promise="A device is an index, a name or a torch.device; one that is absent or of another type is "
    "refused.",
)  # fmt: skip
def device_arguments(accelerator: Accelerator) -> str | None:
    held = [fill(accelerator, (i + 1) * MIB, name) for i, name in enumerate(device_names(accelerator))]
    try:
        return require_device_arguments(accelerator, methods_of(accelerator, *_WITH_DEVICE))
    finally:
        del held


@check(
    "memory_allocated", "max_memory_allocated", "memory_reserved", "memory_cached", "max_memory_reserved",
    "max_memory_cached", "memory_stats", "memory_summary", "reset_peak_memory_stats", "empty_cache",
    promise="An allocation changes every figure of its device, however the device is named, and of no other; "
    "empty_cache() returns the unused memory of every device.",
    once=True,
)  # fmt: skip
def devices_are_counted_apart(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    names = several_devices(accelerator)
    block = block_size(accelerator)
    for index in range(len(names)):  # of each device, whichever it is that empty_cache() empties
        with accelerator.device(index):
            release(accelerator)
    figures = _all_figures(accelerator)
    on_each = [fill(accelerator, MIB, name) for name in names]  # figures of empty devices hide a sum of them
    for index, name in enumerate(names):
        size = allocation_size(accelerator)
        spare = room(accelerator, index)
        for other in range(len(names)):
            accelerator.reset_peak_memory_stats(other)
            left = accelerator.max_memory_allocated(other) - accelerator.memory_allocated(other)
            require(
                left <= SLACK,
                f"reset_peak_memory_stats({other}) leaves the peak of {names[other]} {mib(left)} above "
                "what is allocated",
            )
        texts = [accelerator.memory_summary(other) for other in range(len(names))]
        before = {what: [figure(other) for other in range(len(names))] for what, figure in figures.items()}
        held = fill(accelerator, size, name)

        def follows(what: str, grown: int, size: int = size, spare: int = spare) -> bool:
            of_pool = "cached" in what or "reserved" in what
            least, most = (size - spare, size + block) if of_pool else (size, size)
            return least - SLACK <= grown <= most + SLACK

        for what, figure in figures.items():
            for other in range(len(names)):
                for device in ways_to_name(accelerator, other):
                    grown = figure(device) - before[what][other]
                    require(
                        follows(what, grown) if other == index else abs(grown) <= SLACK,
                        f"{mib(size)} allocated on {name} raise {what} of {device!r} by {mib(grown)}",
                    )
            with accelerator.device(index):
                grown = figure() - before[what][index]
                require(
                    follows(what, grown),
                    f"{mib(size)} allocated on {name}, the current device, raise {what} by {mib(grown)}",
                )
        for other in range(len(names)):
            changed = accelerator.memory_summary(other) != texts[other]
            require(
                changed == (other == index),
                f"{mib(size)} allocated on {name} {'change' if changed else 'do not change'} "
                f"memory_summary({other})",
            )
        del held
        release(accelerator)
        kept = accelerator.memory_reserved(index) - before["memory_reserved"][index]
        require(
            kept <= block + SLACK,
            f"empty_cache() keeps {mib(kept)} reserved on {name}, while {accelerator.current_device_name()} "
            "is the current device",
        )
    del on_each


@check(
    "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached",
    "reset_accumulated_memory_stats",
    promise="A reset applies to its device, however the device is named, and to no other.",
    once=True,
)  # fmt: skip
def resets_by_device(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    names = several_devices(accelerator)
    size, slack = 16 * MIB, 4 * MIB  # several devices are not a host: their figures are exact
    for what, reset in peak_resets(accelerator).items():
        for index, name in enumerate(names):
            for device in (*ways_to_name(accelerator, index), None):
                accelerator.set_device(index if device is None else (index + 1) % len(names))
                _raise_peaks(accelerator, names, size)
                reset(device)
                for other in range(len(names)):
                    above = accelerator.max_memory_allocated(other) - accelerator.memory_allocated(other)
                    cleared = above <= slack
                    require(
                        cleared == (other == index),
                        f"after {what}({device!r}), which means {name}, the peak of {names[other]} is "
                        f"{mib(above)} above what is allocated",
                    )
    if "allocated_bytes.all.allocated" not in accelerator.memory_stats():
        return

    def counted(index: int) -> int:
        return int(accelerator.memory_stats(index)["allocated_bytes.all.allocated"])

    for index, name in enumerate(names):
        for device in (*ways_to_name(accelerator, index), None):
            accelerator.set_device(index if device is None else (index + 1) % len(names))
            _raise_peaks(accelerator, names, size)
            accelerator.reset_accumulated_memory_stats(device)
            for other in range(len(names)):
                cleared = counted(other) <= slack
                require(
                    cleared == (other == index),
                    f"after reset_accumulated_memory_stats({device!r}), which means {name}, "
                    f"{mib(counted(other))} count as allocated on {names[other]} since",
                )


def _raise_peaks(accelerator: Accelerator, names: list[str], size: int) -> None:
    for name in names:
        held = fill(accelerator, size, name)
        del held
    settle(accelerator)


@check(
    "available_memory", "mem_get_info", "total_memory",
    promise="An allocation on one device lowers the available memory of that device, and of no other.",
    timeout_s=240, once=True,
)  # fmt: skip
def what_is_left_by_device(accelerator: Accelerator) -> None:
    names = several_devices(accelerator)
    figures: dict[str, Figure] = {  # what the other rests on first
        "mem_get_info": lambda *device: accelerator.mem_get_info(*device)[0],
        "available_memory": accelerator.available_memory,
    }
    for index, name in enumerate(names):
        size = min(4 * allocation_size(accelerator), accelerator.available_memory(index) // 4)
        for _ in range(ROUNDS):  # others use the memory too, but hardly free as much each time
            release(accelerator)
            kept = room(accelerator, index)
            before = {what: [figure(i) for i in range(len(names))] for what, figure in figures.items()}
            held = fill(accelerator, size, name)
            with accelerator.device(index):
                accelerator.synchronize()
            wrong = _misplaced(accelerator, figures, before, index, size)
            deadline = time.monotonic() + _LAG_S
            while wrong and time.monotonic() < deadline:
                time.sleep(0.05)
                wrong = _misplaced(accelerator, figures, before, index, size)
            del held
            if not wrong:
                break
        else:
            cached = f"after empty_cache(), which keeps {mib(kept)} reserved on {name}: "
            unemptied = cached if kept >= size // 2 else ""
            raise BrokenPromiseError(f"{unemptied}when {mib(size)} are allocated on {name}, {wrong}")


def _misplaced(
    accelerator: Accelerator, figures: dict[str, Figure], before: dict[str, list[int]], index: int, size: int
) -> str:
    """The first figure that contradicts an allocation on one device; nothing if none does."""
    for what, figure in figures.items():
        for other, earlier in enumerate(before[what]):
            for device in ways_to_name(accelerator, other):
                taken = earlier - figure(device)
                if (taken >= size // 2) != (other == index):
                    return f"{what}({device!r}) falls by {mib(taken)}"
        with accelerator.device(index):
            taken = before[what][index] - figure()
            if taken < size // 2:
                return f"{what}() falls by {mib(taken)} on that device"
    return ""
