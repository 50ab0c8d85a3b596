"""Checks of which stream is current: after errors, in other threads, on other devices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    in_thread,
    let_through,
    new_stream,
    require,
    require_streams,
    several_devices,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.device_arguments import require_device_arguments, ways_to_name
from acclimate_conformance.checks.errors import DeliberateError


@check(
    "stream", "current_stream", "default_stream",
    promise="After stream(s) the previous stream is current, even after an error, which is not suppressed.",
)  # fmt: skip
def stream_context_ends(accelerator: Accelerator) -> None:
    before = accelerator.current_stream()
    default = accelerator.default_stream()
    outer, inner = new_stream(accelerator), new_stream(accelerator)
    for stream in (outer, None):
        with let_through(f"stream({'s' if stream else None})"), accelerator.stream(stream):
            raise DeliberateError
        require(accelerator.current_stream() == before, "stream(s) stays current after an error within it")
    with accelerator.stream(outer):
        with suppress(DeliberateError), accelerator.stream(inner):
            raise DeliberateError
        require(
            accelerator.current_stream() == outer,
            "stream(s) within stream(s) does not restore the outer one after an error",
        )
        require(accelerator.default_stream() == default, "default_stream() is another within stream(s)")
        with accelerator.stream(inner):
            pass
        with accelerator.stream(outer):  # the same one again
            pass
        require(
            accelerator.current_stream() == outer,
            "stream(s) within stream(s) of the same stream does not restore it",
        )
    require(
        accelerator.current_stream() == before, "stream(s), when nested, does not restore the first stream"
    )


@check(
    "stream", "set_stream", "current_stream",
    promise="Each thread has its own current stream: a new thread starts on the default stream.",
)  # fmt: skip
def current_stream_of_a_thread(accelerator: Accelerator) -> None:
    mine, inner = new_stream(accelerator), new_stream(accelerator)

    def look() -> tuple[bool, bool]:
        starts_at_default = accelerator.current_stream() == accelerator.default_stream()
        own = new_stream(accelerator)
        with accelerator.stream(own):
            return starts_at_default, accelerator.current_stream() == own

    with accelerator.stream(mine):
        starts_at_default, chooses = in_thread(look)
        require(starts_at_default, "current_stream() of a new thread is that of stream(s) in another")
        require(chooses, "current_stream() within stream(s) in another thread is not s")
        require(
            accelerator.current_stream() == mine,
            "current_stream() changes with stream(s) in another thread",
        )
        with ThreadPoolExecutor(1) as other:  # the same stream in two threads
            index = accelerator.current_device()
            other.submit(accelerator.set_device, index).result()
            entered = accelerator.stream(mine)
            before_there = other.submit(accelerator.current_stream).result()
            other.submit(entered.__enter__).result()
            with accelerator.stream(inner):
                with accelerator.stream(mine):
                    there = other.submit(accelerator.current_stream).result()
                    require(there == mine, "stream(s) that begins in one thread ends that of s in another")
                    other.submit(entered.__exit__, None, None, None).result()
                    there = other.submit(accelerator.current_stream).result()
                    require(
                        there == before_there, "stream(s) in one thread stays current after its block, as s "
                        "is current in another",
                    )  # fmt: skip
                    now = accelerator.current_stream()
                    require(now == mine, "stream(s) that ends in another thread ends here")
                now = accelerator.current_stream()
                require(now == inner, f"after stream(s) in two threads {now} is current here, not {inner}")
    before = accelerator.current_stream()
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(accelerator.current_stream).result()
        try:
            accelerator.set_stream(mine)
            require(
                other.submit(accelerator.current_stream).result() == theirs,
                "set_stream(s) changes the current stream of another thread, which was running",
            )
            starts_at_default, _ = in_thread(look)
            require(starts_at_default, "after set_stream(s) in one thread a new one starts on that stream")
            own = new_stream(accelerator)
            other.submit(accelerator.set_stream, own).result()
            require(
                accelerator.current_stream() == mine,
                "set_stream(s) in another thread changes the one that is current",
            )
        finally:
            accelerator.set_stream(before)
        require(
            other.submit(accelerator.current_stream).result() == own,
            "set_stream(s) changes the stream that another thread has set",
        )


@check(
    "current_stream", "default_stream",
    promise="A device is an index, a name or a torch.device; one that is absent or of another type is "
    "refused.",
)  # fmt: skip
def device_arguments(accelerator: Accelerator) -> str | None:
    methods = {"current_stream": accelerator.current_stream, "default_stream": accelerator.default_stream}
    return require_device_arguments(accelerator, methods)


@check(
    "current_stream", "default_stream", "set_stream", "Stream",
    promise="Each device has its own current stream: setting one does not change those of the others.",
)  # fmt: skip
def streams_by_device(accelerator: Accelerator) -> None:
    require_streams(accelerator)
    names = several_devices(accelerator)
    for index in range(len(names)):
        for device in ways_to_name(accelerator, index):
            for what, found in (
                ("current_stream", accelerator.current_stream(device)),
                ("default_stream", accelerator.default_stream(device)),
            ):
                on = found.device.index
                require(on == index, f"{what}({device!r}) is a stream of device {on}")
        with accelerator.device(index):
            for what, found in (
                ("current_stream()", accelerator.current_stream()),
                ("default_stream()", accelerator.default_stream()),
                ("Stream()", accelerator.Stream()),
            ):
                require(found.device.index == index, f"{what} on {names[index]} is one of {found.device}")
            own = new_stream(accelerator)
            with accelerator.stream(own):
                require(
                    accelerator.current_stream(index) == own, "stream(s) does not make its stream current"
                )
                for other in range(len(names)):
                    _require_default(accelerator, other, index)
        other = (index + 1) % len(names)
        own = accelerator.Stream(device=names[other])
        require(own.device.index == other, f"Stream(device={names[other]!r}) is one of {own.device}")


def _require_default(accelerator: Accelerator, other: int, chosen_on: int) -> None:
    if other != chosen_on:
        found: Any = accelerator.current_stream(other)
        require(
            found == accelerator.default_stream(other),
            f"stream(s) of device {chosen_on} makes {found} current on device {other}",
        )
