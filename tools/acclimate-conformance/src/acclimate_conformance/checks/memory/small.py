"""Checks that memory figures are exact: small tensors show, and methods agree with memory_stats."""

from __future__ import annotations

from collections.abc import Callable

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import MIB, NotOfferedError, is_host, require, short
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.memory.allocations import (
    fill,
    mib,
    peak_figures,
    release,
    require_figures,
    settle,
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
_COUNT = "allocation.all.current"
"""How many allocations there are, if an allocator says it."""
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
        before, counted = accelerator.memory_allocated(), accelerator.memory_stats().get(_COUNT)
        held = [fill(accelerator, size) for size in sizes]
        while_held = accelerator.memory_allocated()
        if counted is not None:
            more = accelerator.memory_stats()[_COUNT] - counted
            require(more == len(sizes), f'{what} raise memory_stats()["{_COUNT}"] by {more}')
        require_equal_figures(accelerator, f"while {what} are held")
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
        require_equal_figures(accelerator, f"after {what} were freed")
    require(int(kept[-1]) == 7, "a tensor changed while figures were read")


def require_equal_figures(accelerator: Accelerator, when: str) -> None:
    """Fails the check if two figures of the same thing differ, or less is reserved than allocated."""
    allocated = accelerator.memory_allocated()
    for name, reserved in (
        ("memory_reserved", accelerator.memory_reserved()),
        ("memory_cached", accelerator.memory_cached()),
    ):
        require(reserved >= allocated, f"{when}, {name}() is {reserved}, and memory_allocated() {allocated}")
    for older, newer in (("memory_cached", "memory_reserved"), ("max_memory_cached", "max_memory_reserved")):
        figure, wanted = getattr(accelerator, older)(), getattr(accelerator, newer)()
        require(figure == wanted, f"{when}, {older}() is {figure}, and {newer}() {wanted}")
    methods = statistics_figures(accelerator)
    found = accelerator.memory_stats()
    for key, method in methods.items():
        if key in found:
            figure = method()
            require(
                int(found[key]) == figure,
                f'{when}, memory_stats()["{key}"] is {found[key]}, and {method.__name__}() {figure}',
            )


_SIZE = 6 * MIB


@check(
    "memory_allocated", "memory_stats",
    promise="Memory counts by its bytes, however it is allocated, until its last tensor goes.",
)  # fmt: skip
def every_way_to_allocate_shows(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    if is_host(accelerator):
        raise NotOfferedError("a host's figures are those of the whole process")
    can_resize = _can_resize_storages(accelerator.current_device_name())
    ways = _ways_to_allocate(accelerator)
    if not can_resize:
        del ways["untyped_storage().resize_()"]
    for what, allocate in ways.items():
        settle(accelerator)
        before = accelerator.memory_allocated()
        made = allocate()
        settle(accelerator)
        grown = accelerator.memory_allocated() - before
        require(
            _SIZE <= grown <= _SIZE + _SIZE // 4,
            f"{what} takes {mib(_SIZE)}, and memory_allocated() grows by {mib(grown)}",
        )
        part = made.view(-1)[1:]
        del made
        settle(accelerator)
        kept = accelerator.memory_allocated() - before
        require(
            kept == grown,
            f"memory_allocated() counts {mib(kept)} for a view of what {mib(grown)} hold: {what}",
        )
        if can_resize:
            part.untyped_storage().resize_(0)
        else:
            del part
        settle(accelerator)
        left = accelerator.memory_allocated() - before
        require(
            left == 0, f"after {what}, and a storage that was made empty, memory_allocated() is {left} higher"
        )


def _can_resize_storages(device: str) -> bool:
    """Whether torch resizes storages on a device; it refuses Apple's."""
    try:
        torch.empty(2, device=device).untyped_storage().resize_(4)
    except RuntimeError:
        return False
    return True


def _ways_to_allocate(accelerator: Accelerator) -> dict[str, Callable[[], torch.Tensor]]:
    device = accelerator.current_device_name()
    of_host = torch.ones(_SIZE // 4)
    source = of_host.to(device)

    def empty_of(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        return lambda: torch.empty(_SIZE // dtype.itemsize, dtype=dtype, device=device)

    def resized() -> torch.Tensor:
        return torch.empty(0, device=device).resize_(_SIZE // 4)

    def with_larger_storage() -> torch.Tensor:
        made = torch.empty(8, device=device)
        made.untyped_storage().resize_(_SIZE)
        return made

    dtypes = dict.fromkeys((*accelerator.supported_dtypes(), torch.int64, torch.int16, torch.bool))
    return {f"torch.empty of {short(dtype)}": empty_of(dtype) for dtype in dtypes} | {
        "torch.zeros": lambda: torch.zeros(_SIZE // 4, device=device),
        "torch.empty_strided": lambda: torch.empty_strided((_SIZE // 8, 2), (2, 1), device=device),
        "torch.empty_like": lambda: torch.empty_like(source),
        "a copy from the host": lambda: of_host.to(device),
        "clone()": source.clone,
        "the result of an operator": lambda: source * 2,
        "a result with out": lambda: torch.add(source, 1, out=torch.empty(0, device=device)),
        "torch.cat": lambda: torch.cat([source[::2], source[1::2]]),
        "a conversion": lambda: source[::2].to(torch.int64),
        "resize_()": resized,
        "untyped_storage().resize_()": with_larger_storage,
    }
