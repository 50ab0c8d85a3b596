"""Streams and events: queues of device work, and points in those queues."""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from acclimate.accelerator import host
from acclimate.accelerator.devices import DeviceLike, Devices
from acclimate.errors import UnsupportedError


class Streams(Devices):
    """Queues of device work and the events that order and time it."""

    supports_streams: ClassVar[bool] = True
    """Whether the device may have more than one queue of work. If not, :attr:`Stream` and :attr:`Event`
    represent the device's single queue, and the conformance checks that need several streams count as not
    offered.

    CPU: true; its streams are host streams, since it is synchronous.
    CUDA: true.
    """

    def _stream_class(self, name: str) -> type[Any] | None:
        """Returns torch's class ``name`` (``Stream`` or ``Event``) for this device, if it has streams."""
        if self.is_synchronized_device() or not self.supports_streams:
            return None
        generic: type[Any] = getattr(torch, name)
        offered = getattr(self.torch_module, name, None)
        if isinstance(offered, type) and offered is not generic:
            return offered
        if offered is None and not self._is_torch_accelerator():
            return None
        return generic if self._generic_streams_work else None

    @functools.cached_property
    def _generic_streams_work(self) -> bool:
        """Whether torch's generic streams and events do what they promise on this device.

        They are optional for a device's guard. torch's guard for devices written in Python returns the
        default stream for each new one, and its events cannot be waited for.
        """
        current = self._offered("current_stream")
        try:
            first, second = torch.Stream(device=self.device_type), torch.Stream(device=self.device_type)
            start, end = (torch.Event(device=self.device_type, enable_timing=True) for _ in range(2))
            start.record(first)
            end.record(first)
            second.wait_event(end)
            end.synchronize()
            elapsed_ms = start.elapsed_time(end)
            with first:
                is_current = current is None or current() == first
        except RuntimeError:  # also NotImplementedError
            return False
        return first != second and is_current and end.query() and 0 <= elapsed_ms < math.inf

    @functools.cached_property
    def _stand_ins(self) -> tuple[type[host.HostStream], type[host.HostEvent]]:
        if self.is_synchronized_device():
            return host.HostStream, host.HostEvent
        return host.classes_for_one_queue(self.device_type, self.synchronize)

    @property
    def Stream(self) -> type[Any]:
        """The class of this accelerator's streams.

        Delegates to: ``torch.<device>.Stream``, else ``torch.Stream`` if a trial of it works.
        CPU: :class:`~acclimate.accelerator.host.HostStream`, whose queue is always empty. Other devices
            without streams have a subclass that waits for the device.
        CUDA: ``torch.cuda.Stream``.
        """
        return self._stream_class("Stream") or self._stand_ins[0]

    @property
    def Event(self) -> type[Any]:
        """The class of this accelerator's events. ``Event(enable_timing=True)`` measures milliseconds.

        Delegates to: ``torch.<device>.Event``, else ``torch.Event`` if a trial of it works.
        CPU: :class:`~acclimate.accelerator.host.HostEvent`, on the host's clock.
        CUDA: ``torch.cuda.Event``.
        """
        return self._stream_class("Event") or self._stand_ins[1]

    def stream(self, stream: Any | None) -> AbstractContextManager[Any]:
        """A context manager: work is queued on ``stream``, whose device is current. ``None`` changes nothing.

        Delegates to: ``torch.<device>.stream``, else the stream's own context manager.
        CPU: work runs immediately.
        CUDA: ``torch.cuda.stream``.
        """
        if stream is None:
            return nullcontext()
        enter = getattr(self.torch_module, "stream", None)
        if enter is None or isinstance(stream, host.HostStream):
            # torch.Stream and HostStream are context managers. In torch 2.10 an object of torch.Stream cannot
            # be entered again within itself, but another object of the same stream can. A compiler can trace
            # only the first.
            own: AbstractContextManager[Any] = stream
            if type(stream) is torch.Stream and not torch.compiler.is_compiling():
                own = torch.Stream(
                    stream_id=stream.stream_id,
                    device_index=stream.device_index,
                    device_type=stream.device_type,
                )
            return own
        context: AbstractContextManager[Any] = enter(stream)
        return context

    def current_stream(self, device_index: DeviceLike = None) -> Any:
        """The current stream of a device, an object of :attr:`Stream`.

        Delegates to: ``torch.<device>.current_stream``, else ``torch.accelerator.current_stream``.
        CPU: the innermost ``with acc.stream(…)`` of this thread, else the default stream.
        CUDA: ``torch.cuda.current_stream``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        index = self._index(device_index)
        current = self._offered("current_stream")
        kind = self.Stream
        if current is None or issubclass(kind, host.HostStream):
            return host.current_host_stream(kind if issubclass(kind, host.HostStream) else host.HostStream)
        return current(index)

    def default_stream(self, device_index: DeviceLike = None) -> Any:
        """The default stream of a device, an object of :attr:`Stream`.

        Delegates to: ``torch.<device>.default_stream``, else stream 0 of the device.
        CPU: one stream for the process.
        CUDA: ``torch.cuda.default_stream``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        index = self._index(device_index)
        kind = self.Stream
        if issubclass(kind, host.HostStream):
            return host.default_host_stream(kind)
        default = getattr(self.torch_module, "default_stream", None)
        if default is not None:
            return default(index)
        # torch's convention for every device type (c10::Stream::DEFAULT): id 0 is the default stream.
        # torch.xpu and torch.accelerator have no function that returns it.
        current = self.current_stream(index)
        return self.Stream(stream_id=0, device_index=index, device_type=current.device_type)

    def set_stream(self, stream: Any | None) -> None:
        """Sets the current stream; ``None`` changes nothing.

        Delegates to: ``torch.<device>.set_stream``, else ``torch.accelerator.set_stream``.
        CPU: changes only the result of :meth:`current_stream`.
        CUDA: ``torch.cuda.set_stream``.

        Raises:
            UnsupportedError: torch has no such function for this device.
        """
        if stream is None:
            return
        if isinstance(stream, host.HostStream):
            host.set_host_stream(stream)
            return
        select = self._offered("set_stream")
        if select is None:
            raise UnsupportedError(
                f"torch cannot set the current stream of {self.device_type}. "
                "Use `with accelerator.stream(stream):` instead."
            )
        select(stream)
