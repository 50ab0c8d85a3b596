"""Checks of devices: names, how many there are, and the current one."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import product
from unittest import mock

import torch

from acclimate.accelerator import Accelerator
from acclimate.backends import BUILTIN
from acclimate.selection import detect_all
from acclimate_conformance.checks.assertions import (
    BrokenPromiseError,
    device_names,
    exactly,
    in_thread,
    is_host,
    let_through,
    require,
    several_devices,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.device_arguments import (
    has_indices,
    methods_of,
    require_device_arguments,
    ways_to_name,
)
from acclimate_conformance.checks.errors import DeliberateError
from acclimate_conformance.checks.target import record_of


@check(
    "device_name", "current_device_name", "device_type", "name", "torch_module",
    promise="torch can use every device by the name that the accelerator gives it.",
)  # fmt: skip
def names(accelerator: Accelerator) -> None:
    called = exactly(accelerator.name, str, "name")
    kind = exactly(accelerator.device_type, str, "device_type")
    records = {candidate.name for candidate in detect_all()}
    require(called == kind or called in records, f"name is {called!r}, which is no registered accelerator")
    for unnamed in (accelerator.device_name(), accelerator.device_name(None)):
        require(unnamed == kind, f"device_name() is {unnamed!r}, not {kind!r}")
    current = accelerator.current_device()
    named = accelerator.device_name(current)
    here = accelerator.current_device_name()
    require(here == named, f"current_device_name() is {here!r}, device_name({current}) {named!r}")
    for index in range(accelerator.device_count()):
        name = exactly(accelerator.device_name(index), str, "device_name()")
        wanted = index if has_indices(accelerator) else None
        require(torch.device(name) == _device(kind, wanted), f"device_name({index}) is {name!r}")
    for name in [kind, *device_names(accelerator), here]:
        placed = torch.ones(3, device=name)
        require(placed.device.type == kind, f"a tensor made on {name!r} is on {placed.device}")
        require(float(placed.sum()) == 3.0, f"three ones made on {name!r} add up to {float(placed.sum())}")
        asked = torch.device(name).index
        require(asked in (None, placed.device.index), f"a tensor made on {name!r} is on {placed.device}")
    unnamed_place = torch.ones(1, device=kind).device
    current_place = torch.ones(1, device=here).device
    require(unnamed_place == current_place, f"{kind!r} means {unnamed_place}, the current {current_place}")
    module, offered = getattr(torch, kind, None), accelerator.torch_module
    require(
        module is None or offered is module, f"torch_module is {offered!r} and torch.{kind} is {module!r}"
    )


_DEEP = 12


def _device(kind: str, index: int | None) -> torch.device:
    return torch.device(kind) if index is None else torch.device(kind, index)


@check(
    "device_count", "is_available", "current_device",
    promise="There is at least one device, the current one is an index among them, no device is left out, "
    "and the record, with which the launcher counts, has as many.",
)  # fmt: skip
def counts(accelerator: Accelerator) -> None:
    count = exactly(accelerator.device_count(), int, "device_count()")
    require(count >= 1, f"device_count() is {count}")
    require(
        exactly(accelerator.is_available(), bool, "is_available()"),
        f"is_available() is False, and device_count() {count}",
    )
    current = exactly(accelerator.current_device(), int, "current_device()")
    require(0 <= current < count, f"current_device() is {current} among {count} devices")
    if has_indices(accelerator):
        beyond = None
        with suppress(Exception):  # each device refuses in its own way
            beyond = torch.ones(1, device=f"{accelerator.device_type}:{count}").device.index
        require(beyond != count, f"device_count() is {count}, but torch makes a tensor on device {count}")
    _require_counted_by_its_record(accelerator)
    _require_count_stays(accelerator)


def _require_count_stays(accelerator: Accelerator) -> None:
    """Fails the check if a limit that is set once the device is in use changes how many there are."""
    torch.ones(1, device=accelerator.current_device_name())
    count = accelerator.device_count()
    for variable in accelerator.visible_devices_envs():
        for value in ("0", "0,1", ",".join(map(str, range(count + 1)))):
            with mock.patch.dict(os.environ, {variable: value}):
                now = accelerator.device_count()
            told = f"{variable}={value}, set in a process that uses a device,"
            require(now == count, f"{told} changes its device_count() from {count} to {now}")


def _require_counted_by_its_record(accelerator: Accelerator) -> None:
    """Fails the check if a vendor's own record counts other devices than the accelerator.

    acclimate's own records count memory nodes and device files; a device of several tiles has one file. A
    record that counts files counts none of an emulated device, and all devices in a process that sees some.
    """
    record = record_of(accelerator)
    is_limited = any(name in os.environ for name in accelerator.visible_devices_envs())
    if record is None or record in BUILTIN or is_limited:
        return
    what = "the device_count() of its record"
    told, count = exactly(record.device_count(), int, what), accelerator.device_count()
    require(told in (0, count), f"{what} is {told}, and device_count() {count}")


@check(
    "set_device", "current_device", "current_device_name",
    promise="set_device changes the current device, and torch then makes tensors there.",
)  # fmt: skip
def set_device(accelerator: Accelerator) -> None:
    for index, name in enumerate(several_devices(accelerator)):
        for device in (*ways_to_name(accelerator, index), accelerator.device_type, None):
            if device not in (accelerator.device_type, None):  # which mean the device that is current
                accelerator.set_device((index + 1) % accelerator.device_count())
            accelerator.set_device(device)
            current = accelerator.current_device()
            require(current == index, f"after set_device({device!r}) the current device is {current}")
        placed = torch.ones(1, device=accelerator.device_type).device
        require(placed.index == index, f"after set_device({index}) tensors are made on {placed}")
        current_name = accelerator.current_device_name()
        require(current_name == name, f"after set_device({index}) current_device_name() is {current_name!r}")


@check(
    "set_device", "device", "current_device",
    promise="Each thread has its own current device: setting it in one thread changes nothing in another.",
    of="tensors",
)  # fmt: skip
def current_device_of_a_thread(accelerator: Accelerator) -> None:
    several_devices(accelerator)
    accelerator.set_device(0)

    def choose_the_next() -> tuple[int, str]:
        accelerator.set_device(1)
        return accelerator.current_device(), str(torch.ones(1, device=accelerator.device_type).device)

    with accelerator.device(0):
        told, place = in_thread(choose_the_next)
        require(told == 1, f"in a thread that sets device 1, current_device() is {told}")
        require(place == accelerator.device_name(1), f"a thread that sets device 1 makes tensors on {place}")
        here = accelerator.current_device()
        require(here == 0, f"after set_device(1) in another thread the current device here is {here}")
    here = accelerator.current_device()
    require(here == 0, f"after set_device(1) in another thread the current device here is {here}")

    def look() -> tuple[int, str]:
        return accelerator.current_device(), str(torch.ones(1, device=accelerator.device_type).device)

    accelerator.set_device(0)
    first = in_thread(look)
    accelerator.set_device(1)
    second = in_thread(look)
    require(
        first == second,
        f"set_device() moves new threads: they start on {first[1]} if device 0 is current here, and on "
        f"{second[1]} if device 1 is",
    )

    with ThreadPoolExecutor(1) as other:
        for chosen in (0, 1):  # by the other thread, which keeps it while this one chooses
            other.submit(accelerator.set_device, chosen).result()
            before = other.submit(look).result()
            accelerator.set_device(1 - chosen)
            after = other.submit(look).result()
            require(
                before == after,
                f"set_device({1 - chosen}) in one thread moves another from device {before[0]}, tensors on "
                f"{before[1]}, to device {after[0]}, tensors on {after[1]}",
            )
            require(
                before[0] == chosen, f"after set_device({chosen}) in a thread, {before[0]} is current there"
            )


@check(
    "device", "current_device",
    promise="Within device(i) that device is current, and afterwards the previous one, even after an error.",
)  # fmt: skip
def device_context(accelerator: Accelerator) -> None:
    count = len(device_names(accelerator))
    for before in range(count):
        accelerator.set_device(before)
        before_this = accelerator.current_device()  # a host keeps the one that its launcher set
        with accelerator.device(None), accelerator.device():
            _require_current(accelerator, before_this, "device(None)")
        for index in range(count):
            for device in ways_to_name(accelerator, index):
                with accelerator.device(device):
                    _require_current(accelerator, index if count > 1 else before_this, f"device({device!r})")
                _require_current(accelerator, before_this, f"before, after device({device!r})")
                with let_through(f"device({device!r})"), accelerator.device(device):
                    raise DeliberateError
                _require_current(accelerator, before_this, f"before, after an error in device({device!r})")
        with accelerator.device(count - 1), accelerator.device(0):
            with suppress(DeliberateError), accelerator.device(count - 1):
                raise DeliberateError
            _require_current(accelerator, 0 if count > 1 else before_this, "the outer device(0)")
        _require_current(accelerator, before_this, "before, after nested device()")
        for index, other in product(range(count), repeat=2):
            with accelerator.device(index):
                accelerator.set_device(other)
            what = f"before, after set_device({other}) within device({index})"
            _require_current(accelerator, before_this, what)
        _require_nested(accelerator, count, before_this)
        _require_entered_again(accelerator, count, before_this)


def _require_nested(accelerator: Accelerator, count: int, before: int) -> None:
    """Blocks within blocks, more than a program has: each restores the device of the one around it."""
    chosen = [before]
    with ExitStack() as stack:
        for depth in range(_DEEP):
            chosen.append((depth * depth + depth // 3) % count if count > 1 else before)
            stack.enter_context(accelerator.device(chosen[-1] if count > 1 else None))
            stack.callback(_require_current, accelerator, chosen[-1], f"device() within {depth} others")
    _require_current(accelerator, before, f"before, after {_DEEP} nested blocks of device()")


def _require_entered_again(accelerator: Accelerator, count: int, before: int) -> None:
    """A block that is entered a second time, which it may refuse."""
    for index in range(count):
        block = accelerator.device(index)
        for turn in ("first", "second", "third"):
            try:
                block.__enter__()
            except (RuntimeError, AttributeError):  # as one that contextlib made of a generator
                require(turn != "first", f"device({index}) cannot be entered")
                break
            what = f"device({index}), the same object entered a {turn} time"
            _require_current(accelerator, index if count > 1 else before, what)
            block.__exit__(None, None, None)
            _require_current(accelerator, before, f"before, after {what}")


def _require_current(accelerator: Accelerator, expected: int, where: str) -> None:
    current = accelerator.current_device()
    require(current == expected, f"the current device is {current}, and must be {expected} ({where})")
    if has_indices(accelerator):
        placed = torch.ones(1, device=accelerator.device_type).device
        require(
            placed.index == expected, f"tensors are made on {placed} where {expected} is current ({where})"
        )


_WITH_DEVICE = ("set_device", "device", "synchronize", "get_device_properties", "get_device_name",
                "get_device_capability")  # fmt: skip


@check(
    *_WITH_DEVICE,
    promise="A device is an index, a name or a torch.device; one that is absent or of another type is "
    "refused.",
)  # fmt: skip
def absent_devices(accelerator: Accelerator) -> str | None:
    return require_device_arguments(accelerator, methods_of(accelerator, *_WITH_DEVICE))


@check(
    "get_device_properties", "get_device_name", "get_device_capability", "total_memory",
    promise="Every device has a name, a memory size and a capability of the documented types, and they "
    "agree.",
)  # fmt: skip
def properties(accelerator: Accelerator) -> None:
    for index in range(accelerator.device_count()):
        found = accelerator.get_device_properties(index)
        require(bool(exactly(found.name, str, "its name").strip()), "its name is empty")
        for field, least in (("total_memory", 1), ("multi_processor_count", 1), ("major", 0), ("minor", 0)):
            value = exactly(getattr(found, field), int, field)
            require(value >= least, f"{field} is {value}")
        name = exactly(accelerator.get_device_name(index), str, "get_device_name()")
        require(name == found.name, f"get_device_name() is {name!r}, the properties say {found.name!r}")
        capability = exactly(accelerator.get_device_capability(index), tuple, "get_device_capability()")
        require(len(capability) == 2, f"get_device_capability() is {capability}")
        for number in capability:
            exactly(number, int, "a number of get_device_capability()")
        stated = (found.major, found.minor)
        require(
            capability in {(0, 0), stated},
            f"get_device_capability() is {capability}, the properties say {stated}",
        )
        with accelerator.device(index):
            for what, here, by_index in (
                ("get_device_name()", accelerator.get_device_name(), name),
                ("get_device_capability()", accelerator.get_device_capability(), capability),
                ("get_device_properties().name", accelerator.get_device_properties().name, found.name),
            ):
                require(here == by_index, f"{what} is {here!r} on device {index}, and {by_index!r} by index")
    if is_host(accelerator) and hasattr(os, "sched_setaffinity"):
        _require_cores_of_this_process(accelerator)


def _require_cores_of_this_process(accelerator: Accelerator) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        for cores in ({min(allowed)}, allowed):
            os.sched_setaffinity(0, cores)
            count = accelerator.get_device_properties().multi_processor_count
            require(
                count <= len(cores),
                f"get_device_properties().multi_processor_count is {count}, of {len(cores)} that may be used",
            )
    finally:
        os.sched_setaffinity(0, allowed)


@check(
    "init", "is_initialized",
    promise="init can be called any number of times, and a device that was used says that it is initialised.",
)  # fmt: skip
def initialisation(accelerator: Accelerator) -> None:
    accelerator.init()
    told = exactly(accelerator.is_initialized(), bool, "is_initialized()")
    accelerator.init()
    torch.ones(1, device=accelerator.current_device_name()).add_(1)
    accelerator.synchronize()
    # What is used is initialised, whatever init() did: is_initialized() is at fault if it says otherwise.
    if not exactly(accelerator.is_initialized(), bool, "is_initialized()"):
        raise BrokenPromiseError("is_initialized() is False after the device computed")
    require(told, "init() leaves the device as one that is not initialised")
