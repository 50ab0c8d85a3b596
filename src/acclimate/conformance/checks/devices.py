"""Checks of devices: names, the current device, and waiting for work."""

from __future__ import annotations

from collections.abc import Callable

import torch

from acclimate.accelerator import DeviceLike
from acclimate.conformance.checks.assertions import (
    NotOfferedError,
    Work,
    device_names,
    equal,
    exactly,
    refused,
    require,
    several_devices,
)
from acclimate.conformance.checks.check import check
from acclimate.conformance.checks.target import Subject
from acclimate.errors import InvalidDeviceError


@check("device_name", "current_device_name", "device_type", "name", "torch_module")
def names(subject: Subject) -> None:
    """torch makes tensors on every device by the name that the accelerator gives it."""
    accelerator = subject.accelerator
    exactly(accelerator.name, str, "name")
    kind = exactly(accelerator.device_type, str, "device_type")
    require(
        accelerator.device_name() == kind, f"device_name() is {accelerator.device_name()!r}, not {kind!r}"
    )
    for name in [kind, *device_names(accelerator), accelerator.current_device_name()]:
        exactly(name, str, "a device's name")
        placed = torch.ones(3, device=name)
        require(placed.device.type == kind, f"a tensor made on {name!r} is on {placed.device}")
        require(float(placed.sum()) == 3.0, f"three ones made on {name!r} add up to {float(placed.sum())}")
        index = torch.device(name).index
        require(index in (None, placed.device.index), f"a tensor made on {name!r} is on {placed.device}")
    here = torch.ones(1, device=kind).device
    current = torch.ones(1, device=accelerator.current_device_name()).device
    require(here == current, f"{kind!r} means {here}, the current device's name {current}")
    module = getattr(torch, kind, None)
    offered = accelerator.torch_module
    require(
        module is None or offered is module, f"torch_module is {offered!r} and torch.{kind} is {module!r}"
    )


@check("device_count", "is_available", "current_device")
def counts(subject: Subject) -> None:
    """There is at least one device, and the current one is an index among them."""
    accelerator = subject.accelerator
    count = exactly(accelerator.device_count(), int, "device_count()")
    require(count >= 1, f"device_count() is {count}")
    require(
        exactly(accelerator.is_available(), bool, "is_available()"),
        f"it is not available with {count} devices",
    )
    current = exactly(accelerator.current_device(), int, "current_device()")
    require(0 <= current < count, f"current_device() is {current} among {count} devices")


@check("set_device", "current_device", "current_device_name")
def set_device(subject: Subject) -> None:
    """set_device moves the current device, and with it where tensors are made."""
    accelerator = subject.accelerator
    for index, name in enumerate(several_devices(accelerator)):
        for device in (index, name, torch.device(name)):
            accelerator.set_device((index + 1) % accelerator.device_count())
            accelerator.set_device(device)
            current = accelerator.current_device()
            require(current == index, f"after set_device({device!r}) the current device is {current}")
        placed = torch.ones(1, device=accelerator.device_type).device
        require(placed.index == index, f"after set_device({index}) tensors are made on {placed}")
        current_name = accelerator.current_device_name()
        require(current_name == name, f"after set_device({index}) current_device_name() is {current_name!r}")


@check("device", "current_device")
def device_context(subject: Subject) -> None:
    """Within device(i) that device is current, and after it the one from before, also after an error."""
    accelerator = subject.accelerator
    before = accelerator.current_device()
    with accelerator.device(None):
        require(accelerator.current_device() == before, "device(None) changes the current device")
    names = device_names(accelerator)
    for index, name in enumerate(names):
        with accelerator.device(index):
            inside = accelerator.current_device()
            placed = torch.ones(1, device=accelerator.device_type).device
        require(len(names) == 1 or inside == index, f"within device({index}) the current device is {inside}")
        require(
            len(names) == 1 or placed == torch.device(name),
            f"within device({index}) tensors are made on {placed}",
        )
        after = accelerator.current_device()
        require(after == before, f"after device({index}) the current device is {after} and was {before}")
        try:
            with accelerator.device(index):
                raise KeyError
        except KeyError:
            pass
        after = accelerator.current_device()
        require(
            after == before,
            f"after an error within device({index}) the current device is {after}, was {before}",
        )


@check("set_device", "device", "synchronize", "get_device_properties")
def absent_devices(subject: Subject) -> str | None:
    """A device that does not exist, or is of another type, is refused with InvalidDeviceError."""
    accelerator = subject.accelerator
    uses: dict[str, Callable[[DeviceLike], object]] = {
        "set_device": accelerator.set_device,
        "device": accelerator.device,
        "synchronize": accelerator.synchronize,
        "get_device_properties": accelerator.get_device_properties,
    }
    for name, use in uses.items():
        with refused(f'{name}("meta")', InvalidDeviceError):
            use("meta")
    if accelerator.device_name(0) == accelerator.device_name():
        return "its devices have no names of their own, so every index is one of them"
    for index in (accelerator.device_count(), -1):
        for name, use in uses.items():
            with refused(f"{name}({index}) with {accelerator.device_count()} devices", InvalidDeviceError):
                use(index)
    return None


@check("get_device_properties", "get_device_name", "get_device_capability")
def properties(subject: Subject) -> None:
    """Every device has a name, a memory size and a capability of the stated types."""
    accelerator = subject.accelerator
    for index in range(accelerator.device_count()):
        found = accelerator.get_device_properties(index)
        require(bool(exactly(found.name, str, "its name")), "its name is empty")
        for field in ("total_memory", "multi_processor_count", "major", "minor"):
            exactly(getattr(found, field), int, field)
        require(found.total_memory > 0, f"total_memory is {found.total_memory}")
        name = exactly(accelerator.get_device_name(index), str, "get_device_name()")
        require(name == found.name, f"get_device_name() is {name!r}, the properties say {found.name!r}")
        capability = exactly(accelerator.get_device_capability(index), tuple, "get_device_capability()")
        require(len(capability) == 2, f"get_device_capability() is {capability}")
        for number in capability:
            exactly(number, int, "a number of get_device_capability()")


@check("init", "is_initialized")
def initialisation(subject: Subject) -> None:
    """init may be called any number of times, and a device that was used says that it is initialised."""
    accelerator = subject.accelerator
    accelerator.init()
    accelerator.init()
    torch.ones(1, device=accelerator.current_device_name())
    require(
        exactly(accelerator.is_initialized(), bool, "is_initialized()"), "a tensor was made, and it says no"
    )


@check("synchronize", "is_synchronized_device")
def synchronize(subject: Subject) -> None:
    """After synchronize all queued work is done: what was copied to the host is there."""
    accelerator = subject.accelerator
    if accelerator.is_synchronized_device():
        raise NotOfferedError(
            "it says that work is done when its call returns, so there is nothing to wait for"
        )
    work = Work(accelerator)
    landed = accelerator.pin_empty(work.queue().shape, dtype=torch.float32)
    for arguments in ((), (accelerator.current_device(),)):
        landed.zero_()
        accelerator.synchronize()
        landed.copy_(work.queue(), non_blocking=True)
        event = accelerator.Event()
        event.record(accelerator.current_stream())
        accelerator.synchronize(*arguments)
        # Looked at before the event, from which a host may learn that the work is done.
        require(
            equal(landed, torch.eye(len(landed))),
            "after synchronize() a copy to pinned memory that was queued before it has not arrived",
        )
        require(bool(event.query()), "after synchronize() an event that was recorded before is still pending")


@check("is_synchronized_device", "use_host_timers", "resolves_data_dependency", "handles_memory_backpressure")
def synchronous_claim(subject: Subject) -> None:
    """A device that calls itself synchronous has finished its work when the call returns."""
    accelerator = subject.accelerator
    claims = {
        "is_synchronized_device": accelerator.is_synchronized_device(),
        "use_host_timers": accelerator.use_host_timers(),
        "resolves_data_dependency": accelerator.resolves_data_dependency(),
        "handles_memory_backpressure": accelerator.handles_memory_backpressure(),
    }
    for name, claim in claims.items():
        exactly(claim, bool, f"{name}()")
    if not accelerator.is_synchronized_device():
        raise NotOfferedError("it does not say that its work is done when the call returns")
    work = Work(accelerator)
    landed = accelerator.pin_empty(work.queue().shape, dtype=torch.float32).zero_()
    landed.copy_(work.queue(), non_blocking=True)
    require(
        equal(landed, torch.eye(len(landed))),
        "it calls itself synchronous, and a copy arrives after its call",
    )
    denied = [name for name, claim in claims.items() if not claim]
    require(
        not denied, f"it calls itself synchronous, from which {', '.join(denied)} follows, and denies that"
    )
