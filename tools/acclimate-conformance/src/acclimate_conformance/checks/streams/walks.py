"""A walk over streams and events: each stream reads what was written before what it waited for."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import new_stream, require, require_streams
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.walking import Walk, move, walk

_WALKS, _MOVES = 8, 40
_LENGTH = 1 << 14
_MODULUS = 4093
"""Numbers stay below it, so that float32 holds three times their sums exactly."""
_SIDES = 2
_PRODUCT = 256
_PATIENCE_S = 120
_RESOLUTION_MS = 0.1

_Clock = dict[int, int]
"""For each stream the number of its moves that are known to be complete."""


class _Slot:
    """A tensor, the number that all its elements must have, and the moves that used it."""

    def __init__(self, index: int, tensor: torch.Tensor, made_on: int) -> None:
        self.index, self.tensor, self.made_on = index, tensor, made_on
        self.value = 0
        self.written: tuple[int, int] = (made_on, 0)
        self.read: list[tuple[int, int]] = []


class _Ordered(Walk):
    """What each stream has waited for, as clocks, and what each tensor holds if all waits wait."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self.start = accelerator.current_device()
        self.indices = range(len(self.names))
        self.streams: list[Any] = []
        self.on: list[int] = []
        for index, name in enumerate(self.names):
            made = [new_stream(accelerator, name) for _ in range(_SIDES)]
            for stream in (accelerator.default_stream(index), *made):
                self.streams.append(stream)
                self.on.append(index)
        self.clocks: list[_Clock] = [{} for _ in self.streams]
        self.counts = [0] * len(self.streams)
        self.host: _Clock = {}
        self.events: list[tuple[Any, _Clock]] = []
        self.matrices = [torch.eye(_PRODUCT, device=name) for name in self.names]
        self.slots: list[_Slot] = []
        self.written: list[int] = []
        for index, name in enumerate(self.names):
            for _ in range(2):
                made_on = self.on.index(index)
                self.slots.append(_Slot(index, torch.zeros(_LENGTH, device=name), made_on))
        self._synchronize()

    def _synchronize(self) -> None:
        for index in self.indices:
            self.accelerator.synchronize(index)
        self.host = dict(enumerate(self.counts))

    def _stream(self, choose: random.Random, index: int) -> int:
        return choose.choice([place for place, on in enumerate(self.on) if on == index])

    def _known(self, place: int) -> _Clock:
        return _later(self.clocks[place], self.host)

    def _needed(self, place: int, slot: _Slot, writes: bool) -> list[int]:
        """The streams that a stream must still wait for before it uses a tensor."""
        known = {**self._known(place), place: self.counts[place]}
        before = [slot.written, *(slot.read if writes else ())]
        return sorted({other for other, count in before if known.get(other, 0) < count})

    def _wait(self, choose: random.Random, place: int, other: int) -> str:
        """Makes a stream wait for all that was queued on another one, in one of many ways; tells which."""
        waiting, producer = self.streams[place], self.streams[other]
        clock = {**self.clocks[other], other: self.counts[other]}

        def recorded() -> Any:
            event = self.accelerator.Event(enable_timing=choose.random() < 0.3)
            event.record(producer)
            return event

        def by_query() -> None:
            event, deadline = recorded(), time.monotonic() + _PATIENCE_S
            while not event.query():
                require(time.monotonic() < deadline, "Event.query() stays False")
                time.sleep(0.0005)

        def recorded_twice() -> None:
            event = self.accelerator.Event()
            event.record(waiting)
            event.record(producer)
            waiting.wait_event(event)

        def elsewhere() -> None:
            event = recorded()
            self.in_actor(1 - self.actor, lambda: event.wait(waiting))

        def by_the_current() -> None:
            # A stream's block may leave another device current, whose stream would then wait.
            with self.accelerator.device(self.on[place]), self.accelerator.stream(waiting):
                recorded().wait()

        def within_the_producer() -> None:
            event = self.accelerator.Event()
            with self.accelerator.device(self.on[other]), self.accelerator.stream(producer):
                event.record()
            waiting.wait_event(event)

        def for_the_default() -> None:
            self.accelerator.synchronize(self.on[other])

        on_the_device: dict[str, Callable[[], object]] = {
            "Stream.wait_stream()": lambda: waiting.wait_stream(producer),
            "Stream.wait_event()": lambda: waiting.wait_event(recorded()),
            "Event.wait(stream)": lambda: recorded().wait(waiting),
            "Event.wait() within stream(s)": by_the_current,
            "Stream.record_event() and wait_event()": lambda: waiting.wait_event(producer.record_event()),
            "Event.record(), again, and wait_event()": recorded_twice,
            "Event.record() within stream(s) and wait_event()": within_the_producer,
        }
        if not self.actor:
            on_the_device["Event.wait(stream) in another thread"] = elsewhere
        on_the_host: dict[str, Callable[[], object]] = {
            "Stream.synchronize()": producer.synchronize,
            "Event.synchronize()": lambda: recorded().synchronize(),
            "Event.query() until it is True": by_query,
            "synchronize() of its device": for_the_default,
        }
        told = choose.choice([*on_the_device, *on_the_device, *on_the_host])
        self.say(f"{told}, by which {self._name(place)} waits for {self._name(other)},")
        if told in on_the_device:
            on_the_device[told]()
            self.clocks[place] = _later(self.clocks[place], clock)
        else:
            on_the_host[told]()
            self.host = _later(self.host, clock)
            if told.startswith("synchronize"):
                mine = {p: self.counts[p] for p, on in enumerate(self.on) if on == self.on[other]}
                self.host = _later(self.host, mine)
        return told

    def _name(self, place: int) -> str:
        index = self.on[place]
        number = place - self.on.index(index)
        return f"{f'stream {number}' if number else 'the default stream'} of {self.names[index]}"

    def _use(self, place: int, read: _Slot | None, written: _Slot) -> None:
        self.clocks[place] = self._known(place)
        self.counts[place] += 1
        here = (place, self.counts[place])
        if read is not None:
            read.read.append(here)
        written.written, written.read = here, []

    @move(8)
    def computes(self, choose: random.Random) -> None:
        index = choose.choice(self.indices)
        place = self._stream(choose, index)
        mine = [slot for slot in self.slots if slot.index == index]
        target, source = choose.choice(mine), choose.choice(mine)
        self.say(f"work on {self._name(place)}")
        for other in sorted({*self._needed(place, target, True), *self._needed(place, source, False)}):
            self._wait(choose, place, other)
        self._elsewhere(choose)
        with self.accelerator.stream(self.streams[place]):
            if choose.random() < 0.7:
                self._delay(index)
            target.tensor.mul_(3).add_(source.tensor).add_(1).remainder_(_MODULUS)
        before = source.value if source is not target else 3 * target.value
        target.value = (3 * target.value + before + 1) % _MODULUS
        self._use(place, source, target)
        self._seen(choose)

    @move(3)
    def copies_to_another_device(self, choose: random.Random) -> None:
        index, there = choose.choice(self.indices), choose.choice(self.indices)
        if index == there:
            return
        place, arriving = self._stream(choose, index), self._stream(choose, there)
        source = choose.choice([slot for slot in self.slots if slot.index == index])
        target = choose.choice([slot for slot in self.slots if slot.index == there])
        # The source is read on its device's current stream, for which that of the target then waits.
        self.say(f"a copy from {self._name(place)} to {self._name(arriving)}")
        for at, slot, writes in ((place, source, False), (arriving, target, True)):
            for other in self._needed(at, slot, writes):
                self._wait(choose, at, other)
        self.say(f"a copy from {self._name(place)} to {self._name(arriving)}")
        with self.accelerator.stream(self.streams[arriving]), self.accelerator.stream(self.streams[place]):
            self._delay(index)
            target.tensor.copy_(source.tensor, non_blocking=choose.random() < 0.5)
        both = _later(self._known(place), self._known(arriving))
        self.clocks[place], self.clocks[arriving] = both, dict(both)
        self._use(place, source, target)
        self._use(arriving, None, target)
        self.clocks[arriving][place] = self.counts[place]
        self.clocks[place][arriving] = self.counts[arriving]
        target.value = source.value
        self._seen(choose)

    @move(3)
    def renews(self, choose: random.Random) -> None:
        slot = choose.choice(self.slots)
        place = self._stream(choose, slot.index)
        self.say(f"record_stream(), and another tensor on {self._name(place)}")
        for other in sorted({user for user, _ in (slot.written, *slot.read)} - {slot.made_on}):
            slot.tensor.record_stream(self.streams[other])
        value = choose.randrange(_MODULUS)
        with self.accelerator.stream(self.streams[place]):
            slot.tensor = torch.full((_LENGTH,), float(value), device=self.names[slot.index])
        slot.value, slot.made_on = value, place
        self._use(place, None, slot)
        self._seen(choose)

    @move(2)
    def measures(self, choose: random.Random) -> None:
        place = choose.randrange(len(self.streams))
        stream = self.streams[place]
        self.say(f"Event.elapsed_time() of events on {self._name(place)}")
        events = [self.accelerator.Event(enable_timing=True) for _ in range(3)]
        for event in events:
            with self.accelerator.device(self.on[place]), self.accelerator.stream(stream):
                event.record()
                self._delay(self.on[place])
        events[-1].synchronize()
        done = [event.query() for event in events]
        require(done == [True] * 3, f"Event.query() after a later event's synchronize() is {done}")
        first, second = events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])
        whole = events[0].elapsed_time(events[2])
        require(
            first >= 0 and second >= 0 and abs(whole - first - second) <= _RESOLUTION_MS,
            f"Event.elapsed_time() is {first} and {second} ms one by one, and {whole} ms together",
        )

    @move(1)
    def waits_for_nothing(self, choose: random.Random) -> None:
        place = choose.randrange(len(self.streams))
        stream, event = self.streams[place], self.accelerator.Event()
        ways: dict[str, Callable[[], object]] = {
            "Stream.wait_event() of an event that was not recorded": lambda: stream.wait_event(event),
            "Event.synchronize() of an event that was not recorded": event.synchronize,
            "Stream.wait_stream() of itself": lambda: stream.wait_stream(stream),
        }
        told = choose.choice(list(ways))
        self.say(told)
        ways[told]()

    def _delay(self, index: int) -> None:
        """Work that takes a while, so that what does not wait for it comes too early."""
        self.matrices[index] @ self.matrices[index] @ self.matrices[index]

    def _elsewhere(self, choose: random.Random) -> None:
        here = choose.choice(self.indices)
        if self.ask("current_device") != here:
            self.accelerator.set_device(here)

    def _seen(self, choose: random.Random) -> None:
        """Now and then compares all tensors; then nothing is queued any more."""
        if choose.random() < 0.4:
            self._synchronize()
            for slot in self.slots:
                found = slot.tensor.cpu().unique().tolist()
                require(
                    found == [slot.value],
                    f"a tensor on {self.names[slot.index]} holds {found[:4]}, not {slot.value}: something "
                    "did not wait",
                )

    def end(self) -> None:
        with suppress(Exception):
            self._synchronize()
        self.accelerator.set_device(self.start)


def _later(one: _Clock, other: _Clock) -> _Clock:
    return {place: max(one.get(place, 0), other.get(place, 0)) for place in {*one, *other}}


@check(
    "Stream", "Event", "stream", "synchronize",
    promise="In any sequence of work, waits and copies on the streams of all devices, in any thread, each "
    "stream reads what was written before what it waited for.",
    once=True,
)  # fmt: skip
def walks_over_streams(accelerator: Accelerator) -> None:
    require_streams(accelerator)
    walk(accelerator, _Ordered, _WALKS, _MOVES)
