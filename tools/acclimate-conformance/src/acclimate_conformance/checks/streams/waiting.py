"""Checks of stream and event objects: what waits for what, what query() says, what time is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    BrokenPromiseError,
    NotOfferedError,
    Work,
    equal,
    exactly,
    refused,
    require,
    require_streams,
)
from acclimate_conformance.checks.check import check

_ROUNDS = 3
_QUERY_TIMEOUT_S = 30.0
_RESOLUTION_MS = 0.01  # of events; some vendors count in microseconds
_LENGTH = 1 << 14


@check(
    "Stream", "Event", "stream",
    promise="Streams and events take torch's arguments, wait for each other, and know when they are "
    "complete.",
)  # fmt: skip
def objects(accelerator: Accelerator) -> None:
    ones = torch.ones(8, device=accelerator.current_device_name())
    streams = {
        "Stream()": accelerator.Stream(),
        "Stream(priority=0)": accelerator.Stream(priority=0),
        "Stream(device=…)": accelerator.Stream(device=accelerator.current_device_name()),
    }
    accelerator.synchronize()
    for what, stream in streams.items():
        kind = torch.device(stream.device).type
        require(kind == accelerator.device_type, f"{what} is a stream of {stream.device}")
        require(isinstance(stream, accelerator.Stream | torch.Stream), f"{what} is a {type(stream).__name__}")
        with accelerator.stream(stream):
            doubled = ones * 2
        event = accelerator.Event()
        event.record(stream)
        same = stream.record_event(event)
        require(same is event, f"Stream.record_event(e) of {what} returns {same!r}, not e")
        made = stream.record_event()
        require(made is not None, f"Stream.record_event() of {what} returns nothing")
        other = accelerator.Stream()
        other.wait_event(event)
        other.wait_event(made)
        other.wait_stream(stream)
        event.wait(other)
        event.wait()
        stream.synchronize()
        require(
            stream.query() is True, f"Stream.query() of {what} is {stream.query()!r} after its synchronize()"
        )
        event.synchronize()
        made.synchronize()
        for recorded in (event, made):
            require(
                recorded.query() is True, f"Event.query() is {recorded.query()!r} after its synchronize()"
            )
        require(float(doubled.sum()) == 16.0, f"work on {what} gives {float(doubled.sum())} instead of 16")


@check(
    "Event", "Stream", "synchronize", "current_stream",
    promise="Each way to wait on the host for an event or a stream waits until earlier copies are complete.",
    once=True,
)  # fmt: skip
def host_waits(accelerator: Accelerator) -> None:
    require_streams(accelerator)
    work = Work(accelerator)
    ways: dict[str, Callable[[Any, Any], object]] = {
        "Stream.synchronize()": lambda stream, event: stream.synchronize(),
        "Event.synchronize()": lambda stream, event: event.synchronize(),
        "synchronize()": lambda stream, event: accelerator.synchronize(),
        "Event.query()": lambda stream, event: _until("Event.query()", event.query),
        "Stream.query()": lambda stream, event: _until("Stream.query()", stream.query),
    }
    for on_default in (False, True):
        for what, wait in ways.items():
            stream = accelerator.current_stream() if on_default else accelerator.Stream()
            landed = accelerator.pin_empty(_LENGTH, dtype=torch.float32).zero_()
            ones = torch.ones(_LENGTH, device=accelerator.current_device_name())
            value = torch.zeros(_LENGTH, device=accelerator.current_device_name())
            accelerator.synchronize()
            event = accelerator.Event()
            with accelerator.stream(stream):
                landed.copy_(ones * work.queue()[0, 0] * 3, non_blocking=True)
                value += work.queue()[0, 0] * 3
                event.record()  # on the stream that is current
            wait(stream, event)
            seen = value * 2
            require(
                equal(landed, torch.full((_LENGTH,), 3.0)),
                f"after {what} an earlier copy to the host is not complete",
            )
            require(
                equal(seen, torch.full((_LENGTH,), 6.0)),
                f"after {what} the default stream reads what was before earlier work",
            )
            accelerator.synchronize()


def _until(what: str, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _QUERY_TIMEOUT_S
    while not done():
        require(
            time.monotonic() < deadline, f"{what} is still False {_QUERY_TIMEOUT_S:.0f} s after little work"
        )
        time.sleep(0.001)


@check(
    "Stream", "Event", "stream", "current_stream",
    promise="Each way for a stream to wait orders its work: it reads what was written before.",
    once=True,
)  # fmt: skip
def streams_wait(accelerator: Accelerator) -> None:
    require_streams(accelerator)
    work = Work(accelerator)
    ways: dict[str, Callable[[Any, Any, Any], object]] = {
        "Stream.wait_event()": lambda waiting, event, producer: waiting.wait_event(event),
        "Stream.wait_stream()": lambda waiting, event, producer: waiting.wait_stream(producer),
        "Event.wait(stream)": lambda waiting, event, producer: event.wait(waiting),
        "Event.wait()": lambda waiting, event, producer: event.wait(),
        "Stream.record_event() for wait_event": lambda waiting, event, producer: waiting.wait_event(
            producer.record_event()
        ),
    }
    for what, wait in ways.items():
        for consumer_is_default in (False, True):
            producer = accelerator.Stream()
            consumer = accelerator.current_stream() if consumer_is_default else accelerator.Stream()
            value = torch.zeros(_LENGTH, device=accelerator.current_device_name())
            accelerator.synchronize()
            event = accelerator.Event()
            with accelerator.stream(producer):
                value += work.queue()[0, 0] * 3
                event.record()
            with accelerator.stream(consumer):
                wait(consumer, event, producer)
                seen = value * 2
            accelerator.synchronize()
            require(
                equal(seen, torch.full((_LENGTH,), 6.0)), f"after {what} a stream read what was before it"
            )


@check(
    "Event", "Stream", "stream", "current_stream",
    promise="An event that is recorded again stands for later work; one never recorded is complete.",
    once=True,
)  # fmt: skip
def events_are_recorded_again(accelerator: Accelerator) -> None:
    require_streams(accelerator)
    work = Work(accelerator)
    ways: dict[str, Callable[[Any, Any], object]] = {
        "Event.synchronize()": lambda waiting, event: event.synchronize(),
        "Event.query()": lambda waiting, event: _until("Event.query()", event.query),
        "Stream.wait_event()": lambda waiting, event: waiting.wait_event(event),
        "Event.wait(stream)": lambda waiting, event: event.wait(waiting),
    }
    for what, wait in ways.items():
        producer, consumer = accelerator.Stream(), accelerator.Stream()
        value = torch.zeros(_LENGTH, device=accelerator.current_device_name())
        accelerator.synchronize()
        event = accelerator.Event()
        wait(consumer, event)
        with accelerator.stream(producer):
            event.record()
            event.synchronize()
            value += work.queue()[0, 0] * 3
            event.record()
        with accelerator.stream(consumer):
            wait(consumer, event)
            seen = value * 2
        accelerator.synchronize()
        require(
            equal(seen, torch.full((_LENGTH,), 6.0)),
            f"Event.record() a second time: after {what} a stream reads what was before the later work",
        )
    fresh = accelerator.Event()
    fresh.synchronize()
    require(fresh.query() is True, "Event.query() of an event that was never recorded is not True")


@check(
    "Stream", "stream", "current_stream",
    promise="Memory of a tensor for which record_stream(s) was called is used again once s is done with "
    "it.",
    once=True,
)  # fmt: skip
def recorded_streams_keep_memory(accelerator: Accelerator) -> None:
    require_streams(accelerator)
    device = accelerator.current_device_name()
    work = Work(accelerator)
    for _ in range(_ROUNDS):
        side = accelerator.Stream()
        value = torch.full((_LENGTH,), 3.0, device=device)
        accelerator.synchronize()
        try:
            value.record_stream(side)
        except NotImplementedError as error:
            raise NotOfferedError(f"record_stream(): {error}") from error
        with accelerator.stream(side):
            seen = value * work.queue()[0, 0] * 2
        del value
        later = [torch.full((_LENGTH,), -1.0, device=device) for _ in range(4)]
        accelerator.synchronize()
        require(
            equal(seen, torch.full((_LENGTH,), 6.0)),
            "after record_stream(s) the memory of a freed tensor is used again before s has read it",
        )
        del later


@check(
    "Event",
    promise="The times between three events add up, and recording an event again replaces its time.",
)  # fmt: skip
def event_times_add_up(accelerator: Accelerator) -> None:
    work = Work(accelerator, at_least_ms=5)
    for _ in range(_ROUNDS):
        first, second, third = (accelerator.Event(enable_timing=True) for _ in range(3))
        for event in (first, second, third):
            event.record()
            work.queue()
        accelerator.synchronize()
        parts = exactly(first.elapsed_time(second), float, "Event.elapsed_time()") + second.elapsed_time(
            third
        )
        whole = first.elapsed_time(third)
        require(
            abs(parts - whole) <= 0.01 * whole + _RESOLUTION_MS,
            f"Event.elapsed_time() of three events is {parts:.3f} ms one by one, {whole:.3f} at once",
        )
        require(parts > 0, "Event.elapsed_time() is 0 with work between two events")
        with suppress(RuntimeError, ValueError):  # a driver may refuse events in the wrong order
            backwards = third.elapsed_time(first)
            require(
                abs(backwards + whole) <= _RESOLUTION_MS,
                f"Event.elapsed_time() is {whole:.3f} ms, and backwards {backwards:.3f}",
            )
        first.record()
        third.record()
        accelerator.synchronize()
        again = first.elapsed_time(third)
        if 0 <= again < whole:
            return
    # The host may have been busy with something else in between, though hardly each time.
    raise BrokenPromiseError(
        f"Event.record() again, without work between events, measures {again:.3f} ms; earlier, with "
        f"work between them, they measured {whole:.3f} ms"
    )


@check(
    "Event",
    promise="elapsed_time raises for an event that was not recorded, or was made without enable_timing=True.",
)  # fmt: skip
def events_without_timing(accelerator: Accelerator) -> None:
    recorded, untimed = accelerator.Event(enable_timing=True), accelerator.Event()
    recorded.record()
    untimed.record()
    accelerator.synchronize()
    with refused("Event.elapsed_time() of an event without enable_timing", RuntimeError, ValueError):
        recorded.elapsed_time(untimed)
    with refused("Event.elapsed_time() of an event that was not recorded", RuntimeError, ValueError):
        recorded.elapsed_time(accelerator.Event(enable_timing=True))
