"""Checks that the host, once it has waited, finds what streams copied to pinned memory, however it waited."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import Work, device_names, equal, require
from acclimate_conformance.checks.check import check

_COUNT = 1 << 16
_POLLED_S = 20.0
Copy = Callable[[], None]
"""Queues a copy to pinned memory on a stream of its own."""


@check(
    "Stream", "Event", "synchronize", "pin_empty",
    promise="Once the host has waited for a stream or an event, in any way, what was copied to pinned memory "
    "before it is there.",
)  # fmt: skip
def waits_deliver_copies(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    work = Work(accelerator, at_least_ms=2)
    values = torch.arange(_COUNT, dtype=torch.float32, device=device)
    wanted = values.cpu()
    for what, wait in _waits(accelerator):
        target = accelerator.pin_empty(_COUNT, dtype=torch.float32).fill_(-1)
        copying = accelerator.Stream()
        copying.wait_stream(accelerator.current_stream())

        def copy(target: torch.Tensor = target, copying: Any = copying) -> None:
            with accelerator.stream(copying):
                work.queue()
                target.copy_(values, non_blocking=True)

        wait(copying, copy)
        require(
            equal(target, wanted),
            f"after {what}, a copy to pinned memory that was queued before is not there",
        )
        accelerator.synchronize()


def _waits(accelerator: Accelerator) -> Iterator[tuple[str, Callable[[Any, Copy], None]]]:
    """Ways to queue a copy on a stream and to wait for it."""
    devices = device_names(accelerator)
    here = accelerator.current_device()

    def recorded(stream: Any, **options: Any) -> Any:
        event = accelerator.Event(**options)
        event.record(stream)
        return event

    def of_stream(a: Any, copy: Copy) -> None:
        copy()
        a.synchronize()

    def of_event(a: Any, copy: Copy) -> None:
        copy()
        recorded(a).synchronize()

    def of_timed_event(a: Any, copy: Copy) -> None:
        copy()
        with accelerator.stream(a):
            event = accelerator.Event(enable_timing=True)
            event.record()
        event.synchronize()

    def of_event_recorded_again(a: Any, copy: Copy) -> None:
        event = recorded(a)
        copy()
        event.record(a)
        event.synchronize()

    def of_stream_that_waited(a: Any, copy: Copy) -> None:
        copy()
        b = accelerator.Stream()
        b.wait_stream(a)
        b.synchronize()

    def of_third_stream(a: Any, copy: Copy) -> None:
        copy()
        b, c = accelerator.Stream(), accelerator.Stream()
        b.wait_event(recorded(a))
        c.wait_event(recorded(b, enable_timing=True))
        recorded(c).synchronize()

    def of_default_stream(a: Any, copy: Copy) -> None:
        copy()
        accelerator.current_stream().wait_stream(a)
        accelerator.current_stream().synchronize()

    def by_event_that_waits(a: Any, copy: Copy) -> None:
        copy()
        b = accelerator.Stream()
        recorded(a).wait(b)
        b.synchronize()

    def by_asking_an_event(a: Any, copy: Copy) -> None:
        copy()
        _poll("Event", recorded(a))

    def by_asking_a_stream(a: Any, copy: Copy) -> None:
        copy()
        _poll("Stream", a)

    def of_device(_: Any, copy: Copy) -> None:
        copy()
        accelerator.synchronize(here)

    def of_stream_of_other_device(a: Any, copy: Copy, by_stream: bool = False) -> None:
        copy()
        peer = accelerator.Stream(device=devices[(here + 1) % len(devices)])
        peer.wait_stream(a) if by_stream else peer.wait_event(recorded(a))
        peer.synchronize()

    yield "a wait for its Stream", of_stream
    yield "a wait for an Event", of_event
    yield "a wait for an Event with enable_timing, recorded on the current Stream", of_timed_event
    yield "a wait for an Event that was recorded a second time", of_event_recorded_again
    yield "a wait for a Stream that waits for its Stream", of_stream_that_waited
    yield "a wait for a third Stream, of which each waits for the one before", of_third_stream
    yield "a wait for the default Stream, which waits for its Stream", of_default_stream
    yield "a wait for a Stream that an Event let wait", by_event_that_waits
    yield "an Event says that it is done", by_asking_an_event
    yield "a Stream says that it is done", by_asking_a_stream
    yield f"synchronize({here})", of_device
    if len(devices) > 1:
        yield "a wait for another device's Stream, which waits for an Event", of_stream_of_other_device
        yield (
            "a wait for another device's Stream, which waits for its Stream",
            lambda a, copy: of_stream_of_other_device(a, copy, by_stream=True),
        )


def _poll(kind: str, asked: Any) -> None:
    until = time.monotonic() + _POLLED_S
    while not asked.query():
        require(time.monotonic() < until, f"{kind}.query() stays false for {_POLLED_S:.0f} s")
