"""Checks of streams and events that are used while another stream or device is current."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    Work,
    device_names,
    equal,
    new_stream,
    require,
    require_streams,
    several_devices,
)
from acclimate_conformance.checks.check import check

_LENGTH = 1 << 14
_ROUNDS = 3


@check(
    "Event", "Stream", "stream", "current_stream",
    promise="A stream or event that is named is meant, whichever stream is current.",
    once=True,
)  # fmt: skip
def named_streams_are_meant(accelerator: Accelerator) -> None:
    require_streams(accelerator)
    work = Work(accelerator)
    records: dict[str, Callable[[Any, Any], Any]] = {
        "Event.record(side)": lambda event, side: event.record(side) or event,
        "Stream.record_event(event)": lambda event, side: side.record_event(event),
        "Stream.record_event()": lambda event, side: side.record_event(),
    }
    waits: dict[str, Callable[[Any], object]] = {
        "Event.synchronize()": lambda event: event.synchronize(),
        "Stream.wait_event(event)": lambda event: accelerator.current_stream().wait_event(event),
        "Event.wait()": lambda event: event.wait(),
    }
    broken = {
        (recorded, waited)
        for recorded, record in records.items()
        for waited, wait in waits.items()
        if not all(_sees(accelerator, work, record, wait) for _ in range(_ROUNDS))
    }
    for recorded, waited in sorted(broken):
        # The one that is wrong with each of the others is at fault.
        both = (
            (recorded, waited) if all((recorded, other) in broken for other in waits) else (waited, recorded)
        )
        require(
            False, f"{both[0]} with {both[1]}, while another stream is current: work before it is not seen"
        )
    _require_idle_is_told(accelerator, work)


def _sees(
    accelerator: Accelerator, work: Work, record: Callable[[Any, Any], Any], wait: Callable[[Any], object]
) -> bool:
    """Whether work of a side stream is seen after a wait for an event that was recorded there."""
    side = accelerator.Stream()
    value = torch.zeros(_LENGTH, device=accelerator.current_device_name())
    accelerator.synchronize()
    with accelerator.stream(side):
        value += work.queue()[0, 0] * 3
    wait(record(accelerator.Event(), side))
    seen = value * 2
    accelerator.synchronize()
    return equal(seen, torch.full((_LENGTH,), 6.0))


def _require_idle_is_told(accelerator: Accelerator, work: Work) -> None:
    """An event of an idle stream is complete while the current one works, and queries tell them apart."""
    for _ in range(_ROUNDS):
        idle = accelerator.Stream()
        accelerator.synchronize()
        busy = accelerator.Event()
        work.queue()
        busy.record()
        event = accelerator.Event()
        event.record(idle)
        event.synchronize()
        told = event.query(), idle.query()
        accelerator.synchronize()
        require(
            told[0] is True, "Event.query() of an event on an idle stream is False after its synchronize()"
        )
        require(told[1] is True, "Stream.query() of an idle stream is False while another one works")


@check(
    "stream", "Stream", "current_stream", "current_device", "set_stream",
    promise="A stream of a device that is not current can be entered; its device is then current, and its "
    "work runs on the stream.",
)  # fmt: skip
def streams_of_other_devices(accelerator: Accelerator) -> None:
    require_streams(accelerator)
    names = device_names(accelerator)
    for here in range(len(names)):
        for there, name in enumerate(names):
            accelerator.set_device(here)
            side = new_stream(accelerator, name)
            default = accelerator.current_stream(here)
            with accelerator.stream(side):
                found = accelerator.current_stream(there)
                require(
                    found == side,
                    f"stream(s), s of {name}, entered on device {here}: current_stream({there}) is {found}",
                )
                now = accelerator.current_device()
                require(
                    now == there,
                    f"stream(s) with a stream of {name}, entered on device {here}: device {now} is current",
                )
                if here != there:
                    require(
                        accelerator.current_stream(here) == default,
                        f"stream(s) with a stream of {name} changes current_stream({here})",
                    )
                tripled = torch.full((_LENGTH,), 2.0, device=name) * 3
                event = side.record_event()
            event.synchronize()
            require(
                equal(tripled, torch.full((_LENGTH,), 6.0)),
                f"stream(s) with a stream of {name}, entered on device {here}: work on it gives wrong values",
            )
            now = accelerator.current_device()
            require(now == here, f"stream(s) with a stream of {name} leaves device {now} current, not {here}")
            with accelerator.device(there):
                require(
                    accelerator.current_stream() == accelerator.default_stream(),
                    f"stream(s) with a stream of {name}, entered on device {here}, outlasts its block",
                )


@check(
    "Event", "Stream", "stream", "synchronize",
    promise="A stream, or the host, waits for events and streams of a device that is not current.",
    once=True,
)  # fmt: skip
def streams_wait_for_other_devices(accelerator: Accelerator) -> None:
    require_streams(accelerator)
    names = several_devices(accelerator)
    ways: dict[str, Callable[[Any, Any, Any], object]] = {
        "Stream.wait_event()": lambda waiting, event, producer: waiting.wait_event(event),
        "Stream.wait_stream()": lambda waiting, event, producer: waiting.wait_stream(producer),
        "Event.wait(stream)": lambda waiting, event, producer: event.wait(waiting),
        "Event.synchronize()": lambda waiting, event, producer: event.synchronize(),
        "Stream.synchronize()": lambda waiting, event, producer: producer.synchronize(),
    }
    for here in range(len(names)):
        there = (here + 1) % len(names)
        with accelerator.device(there):
            work = Work(accelerator)
        accelerator.set_device(here)
        for what, wait in ways.items():
            producer, consumer = (
                accelerator.Stream(device=names[there]),
                accelerator.Stream(device=names[here]),
            )
            value = torch.zeros(_LENGTH, device=names[there])
            for index in (here, there):
                accelerator.synchronize(index)
            event = accelerator.Event()
            with accelerator.stream(producer):
                value += work.queue()[0, 0] * 3
                event.record(producer)
            wait(consumer, event, producer)
            with accelerator.stream(consumer):
                seen = value.to(names[here], non_blocking=True) * 2
            for index in (here, there):
                accelerator.synchronize(index)
            require(
                equal(seen, torch.full((_LENGTH,), 6.0)),
                f"{what} on {names[here]} does not wait for work of {names[there]}",
            )


@check(
    "Stream", "Event",
    promise="Streams of any priority, and events that block or are timed, work like those without options.",
)  # fmt: skip
def options_of_streams_and_events(accelerator: Accelerator) -> str | None:
    require_streams(accelerator)
    blocks = _takes(accelerator.Event, "blocking")
    first = accelerator.Stream()
    for priority in (0, -1):
        stream = accelerator.Stream(priority=priority)
        require(stream != first, f"Stream(priority={priority}) is a stream that exists already")
        with accelerator.stream(stream):
            for options in (
                {"enable_timing": True},
                *([{"blocking": True}, {"enable_timing": True, "blocking": True}] if blocks else []),
            ):
                start, end = accelerator.Event(**options), accelerator.Event(**options)
                start.record()
                doubled = torch.ones(_LENGTH, device=accelerator.current_device_name()) * 2
                end.record()
                end.synchronize()
                require(start.query() is True, f"Event.query() of Event(**{options}) is not True")
                require(equal(doubled, torch.full((_LENGTH,), 2.0)), f"with Event(**{options}) work is wrong")
                if "enable_timing" in options:
                    lasted = start.elapsed_time(end)
                    require(lasted >= 0, f"Event.elapsed_time() of Event(**{options}) is {lasted}")
    return None if blocks else "its events do not take blocking=True"


def _takes(made: type[Any], option: str) -> bool:
    """Whether a class takes an option. Its signature may say so; a class in C has none, so one is made."""
    try:
        inspect.signature(made).bind(**{option: True})
    except TypeError:
        return False
    except ValueError:  # it has no signature
        pass
    try:
        made(**{option: True})
    except TypeError:
        return False
    return True
