"""Streams and events for a device that has none: work is done when its call returns, or in the calls' order.

They keep the interface of ``torch.Stream`` and ``torch.Event``, so that code written for a device with
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
    """A queue that is always empty, because every operation runs to its end where it is called.

    Args:
        device: the device it belongs to; the host by default.
        priority: kept, and without effect.
    """

    _ids = itertools.count()
    _device_type: ClassVar[str] = "cpu"

    @staticmethod
    def _wait() -> None:
        """Waits for the device's one queue; the host has none."""

    def __init__(self, device: torch.device | str | int | None = None, priority: int = 0) -> None:
        # A bare index means "of this accelerator" to torch; the host has one device whatever the index.
        named = device is not None and not isinstance(device, int)
        self.device = torch.device(device if named else self._device_type)  # type: ignore[arg-type]
        self.priority = priority
        self.stream_id = next(self._ids)

    def query(self) -> bool:
        """Whether all work is done: always, after a wait where the device works on its own."""
        self._wait()
        return True

    def synchronize(self) -> None:
        """Waits for all work: returns at once on the host."""
        self._wait()

    def wait_event(self, event: HostEvent) -> None:
        """Makes later work wait for an event: already so."""

    def wait_stream(self, stream: HostStream) -> None:
        """Makes later work wait for another stream: already so."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Records ``event``, or a new one that measures time, and returns it."""
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
    """A moment of the host's clock.

    The arguments are those of ``torch.cuda.Event``. As there, only events made with
    ``enable_timing=True`` can be compared, so that code which forgets it fails here too.

    Args:
        enable_timing: whether :meth:`elapsed_time` may be asked.
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
        """Takes the time, after the work before it."""
        self._wait()
        self._recorded_ns = time.perf_counter_ns()

    def query(self) -> bool:
        """Whether the work before the event is done: always."""
        return True

    def wait(self, stream: HostStream | None = None) -> None:
        """Makes a stream wait for the event: already so."""

    def synchronize(self) -> None:
        """Waits for the event: returns at once."""

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event to ``end_event``.

        Raises:
            RuntimeError: an event was not recorded, or was made without ``enable_timing=True``.
        """
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("Both events must be created with enable_timing=True to measure time.")
        if self._recorded_ns is None or end_event._recorded_ns is None:
            raise RuntimeError("Both events must be recorded before their elapsed time is asked.")
        return (end_event._recorded_ns - self._recorded_ns) / 1e6


class _Thread(threading.local):
    """What is current in one thread, and what was around each ``with`` that it is in."""

    def __init__(self) -> None:
        self.current: dict[type[HostStream], HostStream] = {}
        self.outer: list[HostStream] = []


_thread = _Thread()
_defaults: dict[type[HostStream], HostStream] = {}


def default_host_stream(kind: type[HostStream] = HostStream) -> HostStream:
    """The stream of a kind that is current where none was chosen."""
    return _defaults.get(kind) or _defaults.setdefault(kind, kind())


def current_host_stream(kind: type[HostStream] = HostStream) -> HostStream:
    """The stream of a kind of the innermost ``with`` of this thread."""
    return _thread.current.get(kind) or default_host_stream(kind)


def set_host_stream(stream: HostStream) -> None:
    """Makes a stream the current one of this thread."""
    _thread.current[type(stream)] = stream


def classes_for_one_queue(
    device_type: str, wait: Callable[[], None]
) -> tuple[type[HostStream], type[HostEvent]]:
    """Streams and events of a device that has one queue and works while the host goes on.

    Work is done in the order of the calls, so streams need not wait for each other; what the host waits for,
    and what it measures, is the whole queue.

    Args:
        device_type: torch's name for the device.
        wait: waits for all work queued on it.
    """
    waiting = {"_wait": staticmethod(wait)}
    stream = type("HostStream", (HostStream,), {**waiting, "_device_type": device_type})
    return stream, type("HostEvent", (HostEvent,), waiting)
