"""Checks of waiting for devices, and of what a device says about when its work is complete."""

from __future__ import annotations

from collections.abc import Callable

import torch

from acclimate.accelerator import Accelerator, DeviceLike
from acclimate_conformance.checks.assertions import (
    NotOfferedError,
    Work,
    device_names,
    equal,
    exactly,
    require,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.device_arguments import ways_to_name


@check(
    "synchronize", "is_synchronized_device",
    promise="synchronize waits for all queued work of the device, including copies to the host.",
    once=True,
)  # fmt: skip
def synchronize(accelerator: Accelerator) -> None:
    if accelerator.is_synchronized_device():
        raise NotOfferedError(
            "it says that work is complete when its call returns, so there is nothing to wait for"
        )
    for index in range(len(device_names(accelerator))):
        with accelerator.device(index):
            work = Work(accelerator)
            kind = accelerator.device_type
            unnamed: tuple[DeviceLike, ...] = (None, kind, torch.device(kind))
            for device in unnamed:  # the current device
                _require_waits(
                    accelerator,
                    work,
                    f"synchronize({device!r})",
                    lambda d=device: accelerator.synchronize(d),  # type: ignore[misc]
                )
            _require_waits(accelerator, work, "synchronize()", accelerator.synchronize)
        for device in ways_to_name(accelerator, index):
            accelerator.set_device((index + 1) % accelerator.device_count())
            here = accelerator.current_device()
            with accelerator.device(index):
                queued = _queued_copy(accelerator, work)
            accelerator.synchronize(device)
            _require_landed(queued, f"synchronize({device!r})")
            now = accelerator.current_device()
            require(now == here, f"synchronize({device!r}) makes {now} the current device, which was {here}")


def _queued_copy(accelerator: Accelerator, work: Work) -> tuple[torch.Tensor, object]:
    """Host memory to which a result is being copied, and an event recorded after the copy."""
    landed = accelerator.pin_empty(work.queue().shape, dtype=torch.float32).zero_()
    accelerator.synchronize()
    landed.copy_(work.queue(), non_blocking=True)
    event = accelerator.Event()
    event.record(accelerator.current_stream())
    return landed, event


def _require_waits(accelerator: Accelerator, work: Work, what: str, wait: Callable[[], None]) -> None:
    queued = _queued_copy(accelerator, work)
    wait()
    _require_landed(queued, what)


def _require_landed(queued: tuple[torch.Tensor, object], what: str) -> None:
    landed, event = queued
    # Checked before the event: a host may only learn from the event that the work is complete.
    require(
        equal(landed, torch.eye(len(landed))),
        f"after {what} an earlier copy to pinned memory is not complete",
    )
    pending = not event.query()  # type: ignore[attr-defined]
    require(not pending, f"Event.query() is False after {what} for an earlier event")


@check(
    "is_synchronized_device", "use_host_timers", "resolves_data_dependency", "handles_memory_backpressure",
    promise="A device that says it is synchronous has finished its work when the call returns.",
)  # fmt: skip
def synchronous_claim(accelerator: Accelerator) -> None:
    claims = {
        "is_synchronized_device": accelerator.is_synchronized_device(),
        "use_host_timers": accelerator.use_host_timers(),
        "resolves_data_dependency": accelerator.resolves_data_dependency(),
        "handles_memory_backpressure": accelerator.handles_memory_backpressure(),
    }
    for name, claim in claims.items():
        exactly(claim, bool, f"{name}()")
    require(
        claims["is_synchronized_device"] or not claims["use_host_timers"],
        "use_host_timers() is True, but the device says that its work continues after the call, which the "
        "host's clock cannot measure without waiting",
    )
    if not accelerator.is_synchronized_device():
        raise NotOfferedError("it does not say that its work is complete when the call returns")
    work = Work(accelerator)
    landed = accelerator.pin_empty(work.queue().shape, dtype=torch.float32).zero_()
    landed.copy_(work.queue(), non_blocking=True)
    require(
        equal(landed, torch.eye(len(landed))),
        "it says that it is synchronous, but a copy was not complete when its call returned",
    )
    denied = [name for name, claim in claims.items() if not claim]
    require(not denied, f"it says that it is synchronous, which implies {', '.join(denied)}, but denies that")
