"""Checks of streams and events: options on other devices, threads that end, waits for copies."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    Work,
    all_told,
    device_names,
    equal,
    new_stream,
    require,
    require_streams,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.errors import DeliberateError

_LENGTH = 1 << 14
_MANY = 40
"""More than the 32 streams of a pool."""
_PATIENCE_S = 30


@check(
    "Stream",
    "Event",
    "stream",
    "current_stream",
    "current_device",
    promise="Streams and events with any option belong to the device that is named, and each stream does "
    "its work.",
)
def streams_with_options_by_device(accelerator: Accelerator) -> None:
    require_streams(accelerator)
    names = device_names(accelerator)
    with all_told() as noted:
        for here in range(len(names)):
            accelerator.set_device(here)
            for there, name in enumerate(names):
                for given in (name, torch.device(name)):
                    for priority in (0, -1):
                        made = accelerator.Stream(device=given, priority=priority)
                        told = f"Stream(device={given!r}, priority={priority}) made on device {here}"
                        noted(torch.device(made.device).index == there, f"{told} is one of {made.device}")
                        with accelerator.stream(made):
                            found = accelerator.current_stream(there)
                            result = torch.full((_LENGTH,), 2.0, device=name) * 3
                        made.synchronize()
                        noted(
                            found == made,
                            f"within stream(s), s of {told}, current_stream({there}) is {found}",
                        )
                        noted(equal(result, torch.full((_LENGTH,), 6.0)), f"work on {told} is wrong")
                        noted(made != accelerator.default_stream(there), f"{told} is the default stream")
                placed = accelerator.Stream(name)
                on = torch.device(placed.device).index
                noted(on == there, f"Stream({name!r}), made on device {here}, is one of {placed.device}")
                _note_entered(accelerator, new_stream(accelerator, name), here, there, noted)
        accelerator.set_device(0)
        made_ones = [accelerator.Stream() for _ in range(_MANY)]
        values = []
        for number, stream in enumerate(made_ones):
            with accelerator.stream(stream):
                values.append(torch.full((257,), float(number), device=names[0]) + 1)
        for number, (stream, value) in enumerate(zip(made_ones, values, strict=True)):
            stream.synchronize()
            noted(
                equal(value, torch.full((257,), number + 1.0)),
                f"work on Stream() {number + 1} of {_MANY} is wrong",
            )
            noted(stream.query() is True, f"Stream.query() of stream {number + 1} of {_MANY} is not True")
        for stream in made_ones[:2]:
            others = [stream is None, stream == "stream", stream != stream]
            noted(not any(others) and bool(repr(stream)), f"a Stream compares with other objects as {others}")


def _note_entered(
    accelerator: Accelerator, stream: Any, here: int, there: int, noted: Callable[[bool, str], None]
) -> None:
    """A stream that is entered itself, where its class can be, ends as stream(s) does."""
    if not hasattr(stream, "__enter__"):
        return
    before = [accelerator.current_stream(index) for index in range(len(device_names(accelerator)))]
    for fails in (False, True):
        with suppress(DeliberateError), stream:
            found = accelerator.current_stream(there)
            if fails:
                raise DeliberateError
        noted(
            found == stream,
            f"within a Stream of device {there}, entered itself, current_stream({there}) is {found}",
        )
        now = accelerator.current_device()
        noted(
            now == here,
            f"a block of a Stream of device {there}{' with an error' * fails} leaves device {now} current",
        )
        for index, earlier in enumerate(before):
            later = accelerator.current_stream(index)
            noted(
                later == earlier,
                f"a block of a Stream of device {there} leaves {later} current on device {index}",
            )


@check(
    "Event",
    "Stream",
    "stream",
    "current_stream",
    promise="Events are those of their last record, in whichever thread and on whichever stream that was, "
    "also after "
    "the thread has ended.",
    once=True,
)
def events_outlive_threads(accelerator: Accelerator) -> None:
    require_streams(accelerator)
    index, device = accelerator.current_device(), accelerator.current_device_name()
    work = Work(accelerator, at_least_ms=5)
    ways: dict[str, Callable[[Any], object]] = {
        "Event.synchronize()": lambda event: event.synchronize(),
        "Event.wait()": lambda event: event.wait(),
        "Stream.wait_event()": lambda event: accelerator.current_stream().wait_event(event),
    }
    for named in (False, True):
        for what, wait in ways.items():
            value = torch.zeros(_LENGTH, device=device)
            event = accelerator.Event()
            accelerator.synchronize()

            def elsewhere(value: torch.Tensor = value, event: Any = event, named: bool = named) -> None:
                accelerator.set_device(index)
                side = accelerator.Stream()
                with accelerator.stream(side):
                    value += work.queue()[0, 0] * 3
                    event.record(side) if named else event.record()

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join(_PATIENCE_S)
            gc.collect()
            wait(event)
            seen = value * 2
            accelerator.synchronize()
            require(
                equal(seen, torch.full((_LENGTH,), 6.0)),
                f"{what} of an event that a thread recorded, which has ended, does not wait for its work",
            )
            event.synchronize()
            require(
                event.query() is True, "Event.query() of a complete event of a thread that ended is not True"
            )
    _require_recorded_elsewhere(accelerator, work)


def _require_recorded_elsewhere(accelerator: Accelerator, work: Work) -> None:
    """An event that is recorded again on another stream has the time and the work of that record."""
    first, second = accelerator.Stream(), accelerator.Stream()
    for _ in range(3):
        start, end = (accelerator.Event(enable_timing=True) for _ in range(2))
        accelerator.synchronize()
        start.record(first)
        with accelerator.stream(first):
            work.queue()
        end.record(first)
        accelerator.synchronize()
        long = start.elapsed_time(end)
        with accelerator.stream(second):
            work.queue()
            work.queue()
            work.queue()
        start.record(second)
        end.record(second)
        accelerator.synchronize()
        short = start.elapsed_time(end)
        if 0 <= short < long:
            break
    else:
        require(
            False,
            f"Event.elapsed_time() of events that were recorded again on another stream is {short:.3f} ms",
        )
    for names in [device_names(accelerator)]:
        other = accelerator.Stream(device=names[-1])
        event = accelerator.Event()
        event.record(first)
        with suppress(
            RuntimeError, ValueError
        ):  # a device may refuse a stream of another device, or record there
            event.record(other)
        event.synchronize()
        require(
            event.query() is True, "Event.query() is not True after a record on a stream of another device"
        )
    for pair in ((True, False), (False, True), (False, False)):
        events = [accelerator.Event(enable_timing=timed) for timed in pair]
        for event in events:
            event.record()
        accelerator.synchronize()
        raises = False
        try:
            events[0].elapsed_time(events[1])
        except (RuntimeError, ValueError):
            raises = True
        require(
            raises,
            f"Event.elapsed_time() of events with enable_timing={pair[0]} and {pair[1]} raises nothing",
        )


@check(
    "Event",
    "Stream",
    "synchronize",
    "pin_memory",
    "pin_empty",
    promise="Once a wait for a copy from pinned memory is over, that memory can change, and no other copy "
    "is late.",
    once=True,
)
def waits_end_copies_to_the_device(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    work = Work(accelerator, at_least_ms=5)
    ways: dict[str, Callable[[Any], object]] = {
        "Event.synchronize()": lambda event: event.synchronize(),
        "Stream.synchronize()": lambda event: accelerator.current_stream().synchronize(),
        "synchronize()": lambda event: accelerator.synchronize(),
        "Event.query()": lambda event: _until(event.query),
    }
    for what, wait in ways.items():
        for dtype in (torch.float32, torch.int32):
            source = accelerator.pin_memory(torch.full((_LENGTH,), 3.0))
            into = torch.zeros(_LENGTH, device=device)
            accelerator.synchronize()
            work.queue()
            made = source.to(device, dtype, non_blocking=True, copy=True)
            into.copy_(source, non_blocking=True)
            event = accelerator.Event()
            event.record()
            wait(event)
            source.fill_(9)
            accelerator.synchronize()
            for how, found in (("to()", made), ("copy_()", into)):
                require(
                    equal(found, torch.full((_LENGTH,), 3.0).to(found.dtype)),
                    f"after {what} {how} from pinned memory takes numbers that are written there later",
                )
    _require_apart(accelerator, work, device)


def _until(done: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if done():
            return
        threading.Event().wait(0.001)
    require(False, "Event.query() is still False 20 s after little work")


def _require_apart(accelerator: Accelerator, work: Work, device: str) -> None:
    """Copies to pinned memory that is dropped at once change no memory that is pinned afterwards."""
    accelerator.synchronize()
    values = [torch.full((_LENGTH,), float(n + 1), device=device) for n in range(8)]
    work.queue()
    for value in values:
        accelerator.pin_empty(_LENGTH, dtype=torch.float32).copy_(value, non_blocking=True)
    later = [accelerator.pin_empty(_LENGTH, dtype=torch.float32).fill_(-1) for _ in range(8)]
    ordinary = [torch.full((_LENGTH,), -1.0) for _ in range(8)]
    accelerator.synchronize()
    for tensor in (*later, *ordinary):
        require(
            equal(tensor, torch.full((_LENGTH,), -1.0)),
            "a copy to pinned memory that was dropped changes memory that was made afterwards",
        )
    for name in device_names(accelerator):
        one = torch.zeros(1, device=device)
        for turn in range(1, 5):
            one.fill_(turn)
            moved = one.to(name, non_blocking=True, copy=True)
            copied = torch.zeros(1, device=name).copy_(one, non_blocking=True)
            back = one.to("cpu", non_blocking=True)
            accelerator.synchronize()
            accelerator.synchronize(name)
            found = [float(moved), float(copied), float(back)]
            require(
                found == [turn] * 3,
                f"to() and copy_() of one number, {turn}, from {device} to {name} give {found}",
            )
