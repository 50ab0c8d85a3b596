"""Checks of streams and events: which stream is current, in what order work runs, how long it takes."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    BrokenPromiseError,
    NotOfferedError,
    Work,
    equal,
    exactly,
    new_stream,
    require,
    require_streams,
)
from acclimate_conformance.checks.check import check

_ROUNDS = 5
_DEEP = 12
_AS_MANY_AS_A_POOL = 70  # devices with a pool of streams, which hand them out in turn, have 32
_CLOCK_SLACK_MS = 2.0  # what reading two clocks one after the other may differ by on a busy host


@check(
    "Stream", "stream", "current_stream", "default_stream",
    promise="Within stream(s) the current stream is s, and afterwards the previous one; None changes "
    "nothing. No new stream is the default one.",
)  # fmt: skip
def current_stream(accelerator: Accelerator) -> None:
    before = accelerator.current_stream()
    default = accelerator.default_stream()
    for what, found in (("current_stream()", before), ("default_stream()", default)):
        # torch.Stream is a base of some vendors' streams and what torch's own functions return for others.
        require(isinstance(found, accelerator.Stream | torch.Stream), f"{what} is a {type(found).__name__}")
    require(
        before == default, f"current_stream() is {before} where none was set, and default_stream() {default}"
    )
    first, second = new_stream(accelerator), new_stream(accelerator)
    require(first != second, "Stream() gives two streams that are equal")
    made = [new_stream(accelerator) for _ in range(_AS_MANY_AS_A_POOL)]
    defaults = [number for number, stream in enumerate(made, 1) if stream == default]
    require(not defaults, f"of {len(made)} calls of Stream(), these give the default stream: {defaults[:8]}")
    with accelerator.stream(first):
        require(accelerator.current_stream() == first, "stream(s) does not make its stream current")
        with accelerator.stream(second):
            require(
                accelerator.current_stream() == second,
                "stream(s) within stream(s) does not make its stream current",
            )
        require(
            accelerator.current_stream() == first, "stream(s) within stream(s) does not restore the outer one"
        )
        with accelerator.stream(None):
            require(accelerator.current_stream() == first, "stream(None) changes the current stream")
    require(accelerator.current_stream() == before, "stream(s) does not restore the stream before it")
    require(
        accelerator.current_stream(accelerator.current_device()) == before,
        "current_stream(i) of the current device is not current_stream()",
    )
    with ExitStack() as stack:  # more blocks than a program has
        for depth in range(_DEEP):
            chosen = made[depth * depth % 5]
            stack.enter_context(accelerator.stream(chosen))
            stack.callback(_require_current, accelerator, chosen, f"stream(s) within {depth} others")
    _require_current(accelerator, before, f"the stream before, after {_DEEP} nested blocks of stream(s)")


def _require_current(accelerator: Accelerator, wanted: Any, where: str) -> None:
    now = accelerator.current_stream()
    require(now == wanted, f"current_stream() is {now}, and must be {wanted} ({where})")


@check(
    "set_stream", "current_stream",
    promise="set_stream(s) makes s the current stream until another is set; set_stream(None) changes "
    "nothing.",
)  # fmt: skip
def set_stream(accelerator: Accelerator) -> None:
    before, chosen = accelerator.current_stream(), new_stream(accelerator)
    try:
        accelerator.set_stream(chosen)
    except NotImplementedError as error:
        raise NotOfferedError(f"setting the current stream: {error}") from error
    try:
        require(accelerator.current_stream() == chosen, "set_stream(s) does not make its stream current")
        accelerator.set_stream(None)
        require(accelerator.current_stream() == chosen, "set_stream(None) changes the current stream")
        ones = torch.ones(8, device=accelerator.current_device_name()) * 2
    finally:
        accelerator.set_stream(before)
    chosen.synchronize()
    found = float(ones.sum())
    accelerator.synchronize()
    later = float(ones.sum())
    require(
        found == later, "Stream.synchronize() returns before the work of a stream that was current is done"
    )
    require(found == 16.0, "set_stream(s): work on that stream gives a wrong result")
    require(
        accelerator.current_stream() == before,
        "set_stream(s) with the first stream again does not make it current",
    )


@check(
    "Event", "synchronize",
    promise="elapsed_time is the time of the work between two events, in milliseconds.",
)  # fmt: skip
def events_measure_time(accelerator: Accelerator) -> None:
    work = Work(accelerator)
    for _ in range(_ROUNDS):
        start, end = accelerator.Event(enable_timing=True), accelerator.Event(enable_timing=True)
        accelerator.synchronize()
        began = time.perf_counter()
        start.record()
        work.queue()
        end.record()
        end.synchronize()
        lasted = (time.perf_counter() - began) * 1000
        require(bool(end.query()), "Event.query() is False after its synchronize()")
        measured = exactly(start.elapsed_time(end), float, "elapsed_time()")
        require(
            measured <= lasted * 1.02 + _CLOCK_SLACK_MS,
            f"Event.elapsed_time() is {measured:.2f} ms, the host's clock {lasted:.2f} ms",
        )
        # Always above 0: any clock measures 0 or more, and work may end sooner than expected.
        if measured >= lasted / 2 - min(_CLOCK_SLACK_MS, lasted / 4):
            return
    # The host may have been busy with something else in between, though hardly each time.
    raise BrokenPromiseError(
        f"Event.elapsed_time() is {measured:.2f} ms for work that took {lasted:.2f} ms by the host's clock"
    )


@check(
    "Stream", "Event", "stream", "current_stream",
    promise="A stream that waits for another stream's event sees the work before that event.",
    once=True,
)  # fmt: skip
def events_order_streams(accelerator: Accelerator) -> None:
    require_streams(accelerator)
    work = Work(accelerator)
    for _ in range(_ROUNDS):
        producer, consumer = accelerator.Stream(), accelerator.Stream()
        value = torch.zeros(1 << 16, device=accelerator.current_device_name())
        accelerator.synchronize()
        event = accelerator.Event()
        with accelerator.stream(producer):
            value += work.queue()[0, 0] * 3
            event.record(producer)
        with accelerator.stream(consumer):
            consumer.wait_event(event)
            seen = value * 2
        accelerator.synchronize()
        require(
            equal(seen, torch.full((1 << 16,), 6.0)),
            "Stream.wait_event(event): the stream reads what was before the event",
        )


@check(
    "Stream", "stream", "synchronize", "supports_streams",
    promise="A stream that waits for another sees its queued work; synchronize() waits for the stream's own.",
    once=True,
)  # fmt: skip
def streams_wait_for_streams(accelerator: Accelerator) -> None:
    require_streams(accelerator)
    work = Work(accelerator)
    for _ in range(_ROUNDS):
        producer, consumer = accelerator.Stream(), accelerator.Stream()
        value = torch.zeros(1 << 16, device=accelerator.current_device_name())
        landed = accelerator.pin_empty(1 << 16, dtype=torch.float32).zero_()
        accelerator.synchronize()
        with accelerator.stream(producer):
            value += work.queue()[0, 0] * 3
        consumer.wait_stream(producer)
        with accelerator.stream(consumer):
            landed.copy_(value * 2, non_blocking=True)
        consumer.synchronize()
        require(bool(consumer.query()), "Stream.query() is False after its synchronize()")
        require(
            equal(landed, torch.full((1 << 16,), 6.0)),
            "Stream.wait_stream(other): the stream reads what was before the work of the other",
        )
        accelerator.synchronize()


@check(
    "resolves_data_dependency", "stream",
    promise="If the device says so, one stream can use the results of another without an explicit wait.",
)  # fmt: skip
def dependencies_resolved_by_the_device(accelerator: Accelerator) -> None:
    if not accelerator.resolves_data_dependency():
        raise NotOfferedError("it says that streams must wait for each other explicitly")
    work = Work(accelerator)
    for _ in range(_ROUNDS):
        value = torch.zeros(1 << 16, device=accelerator.current_device_name())
        with accelerator.stream(accelerator.Stream()):
            value += work.queue()[0, 0] * 3
        with accelerator.stream(accelerator.Stream()):
            seen = (value * 2).cpu()
        require(
            equal(seen, torch.full((1 << 16,), 6.0)),
            "resolves_data_dependency() is True, but one stream reads what another has not yet made",
        )
