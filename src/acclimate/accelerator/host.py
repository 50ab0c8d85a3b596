"""Streams and events for devices without streams, whose work is synchronous or in a single queue.

They have the interface of ``torch.Stream`` and ``torch.Event``, so that code written for a device with
streams runs unchanged: a stream is a context manager, and an event measures time.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar

import torch


class HostStream:
    """A queue that is always empty, since every operation finishes before its call returns.

    Args:
        device: its device; the host by default.
        priority: stored, without effect.
    """

    _ids = itertools.count()
    _device_type: ClassVar[str] = "cpu"

    @staticmethod
    def _wait() -> None:
        """Waits for the device's one queue; the host has none."""

    def __init__(self, device: torch.device | str | int | None = None, priority: int = 0) -> None:
        # In torch a bare index means a device of this accelerator; the host has one device for any index.
        named = device is not None and not isinstance(device, int)
        self.device = torch.device(device if named else self._device_type)  # type: ignore[arg-type]
        self.priority = priority
        self.stream_id = next(self._ids)

    def query(self) -> bool:
        """Returns true, after waiting for an asynchronous device."""
        self._wait()
        return True

    def synchronize(self) -> None:
        """Waits for all work; returns at once on the host."""
        self._wait()

    def wait_event(self, event: HostEvent) -> None:
        """Does nothing: later work always follows earlier work."""

    def wait_stream(self, stream: HostStream) -> None:
        """Does nothing: later work always follows earlier work."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Records and returns ``event``, or a new event with timing."""
        event = HostEvent(enable_timing=True) if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> HostStream:
        kind = type(self)
        _thread.outer.append(current_host_stream(kind))
        _thread.current[kind] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outer = _thread.outer.pop()
        _thread.current[type(outer)] = outer

    def __repr__(self) -> str:
        return f"HostStream(device={self.device}, stream_id={self.stream_id})"


class HostEvent:
    """A point in time, on the host's clock.

    Its arguments are those of ``torch.cuda.Event``. As on CUDA, :meth:`elapsed_time` needs events made with
    ``enable_timing=True``, so that code without it fails here too.

    Args:
        enable_timing: whether :meth:`elapsed_time` may be called.
        blocking: without effect.
        interprocess: without effect.
        external: without effect.
    """

    @staticmethod
    def _wait() -> None:
        """Waits for the device's one queue; the host has none."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self.enable_timing = enable_timing
        self._recorded_ns: int | None = None

    def record(self, stream: HostStream | None = None) -> None:
        """Records the time, after waiting for earlier work."""
        self._wait()
        self._recorded_ns = time.perf_counter_ns()

    def query(self) -> bool:
        """Returns true: the work before the event is done."""
        return True

    def wait(self, stream: HostStream | None = None) -> None:
        """Does nothing: later work always follows earlier work."""

    def synchronize(self) -> None:
        """Returns at once."""

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Returns the milliseconds from this event to ``end_event``.

        Raises:
            RuntimeError: an event was not recorded, or was made without ``enable_timing=True``.
        """
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("Both events must be created with enable_timing=True to measure time.")
        if self._recorded_ns is None or end_event._recorded_ns is None:
            raise RuntimeError("Both events must be recorded before elapsed_time() is called.")
        return (end_event._recorded_ns - self._recorded_ns) / 1e6


class _Thread(threading.local):
    """The current streams of one thread, and the outer ones of its ``with`` blocks."""

    def __init__(self) -> None:
        self.current: dict[type[HostStream], HostStream] = {}
        self.outer: list[HostStream] = []


_thread = _Thread()
_defaults: dict[type[HostStream], HostStream] = {}


def default_host_stream(kind: type[HostStream] = HostStream) -> HostStream:
    """Returns the default stream of a class."""
    return _defaults.get(kind) or _defaults.setdefault(kind, kind())


def current_host_stream(kind: type[HostStream] = HostStream) -> HostStream:
    """Returns this thread's current stream of a class."""
    return _thread.current.get(kind) or default_host_stream(kind)


def set_host_stream(stream: HostStream) -> None:
    """Makes a stream this thread's current one."""
    _thread.current[type(stream)] = stream


def classes_for_one_queue(
    device_type: str, wait: Callable[[], None]
) -> tuple[type[HostStream], type[HostEvent]]:
    """Returns the stream and event classes of an asynchronous device with a single queue.

    Its work runs in the order of the calls, so streams need not wait for each other; waits and measurements
    cover the whole queue.

    Args:
        device_type: torch's name for the device.
        wait: waits for all queued work of the device.
    """
    waiting = {"_wait": staticmethod(wait)}
    stream = type("HostStream", (HostStream,), {**waiting, "_device_type": device_type})
    return stream, type("HostEvent", (HostEvent,), waiting)
