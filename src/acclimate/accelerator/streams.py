"""Streams and events: queues of device work, and points in them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from acclimate.accelerator import host
from acclimate.accelerator.devices import DeviceLike, Devices
from acclimate.errors import UnsupportedError


class Streams(Devices):
    """Queues of device work and the events that order and time it."""

    def _stream_class(self, name: str) -> type[Any] | None:
        """torch's class ``name`` (``Stream`` or ``Event``) for this device; None where it has no streams."""
        if self.is_synchronized_device():
            return None
        offered = getattr(self.torch_module, name, None)
        if isinstance(offered, type):
            return offered
        generic: type[Any] | None = getattr(torch, name) if self._is_torch_accelerator() else None
        return generic

    @property
    def Stream(self) -> type[Any]:
        """The class of this accelerator's streams.

        Delegates to: ``torch.<device>.Stream``, else ``torch.Stream``.
        CPU: :class:`~acclimate.accelerator.host.HostStream`: a context manager whose queue is always
            empty.
        CUDA: ``torch.cuda.Stream``.
        """
        return self._stream_class("Stream") or host.HostStream

    @property
    def Event(self) -> type[Any]:
        """The class of this accelerator's events. ``Event(enable_timing=True)`` measures milliseconds.

        Delegates to: ``torch.<device>.Event``, else ``torch.Event``.
        CPU: :class:`~acclimate.accelerator.host.HostEvent`, on the host's clock.
        CUDA: ``torch.cuda.Event``.
        """
        return self._stream_class("Event") or host.HostEvent

    def stream(self, stream: Any | None) -> AbstractContextManager[Any]:
        """A context manager within which work is queued on ``stream``; ``None`` changes nothing.

        Delegates to: ``torch.<device>.stream``, else the stream's own context manager.
        CPU: the work runs where it is called.
        CUDA: ``torch.cuda.stream``.
        """
        if stream is None:
            return nullcontext()
        enter = getattr(self.torch_module, "stream", None)
        if enter is None or isinstance(stream, host.HostStream):
            own: AbstractContextManager[Any] = stream  # torch.Stream and HostStream are context managers
            return own
        context: AbstractContextManager[Any] = enter(stream)
        return context

    def current_stream(self, device_index: DeviceLike = None) -> Any:
        """The stream on which work of a device is queued now; an object of :attr:`Stream`.

        Delegates to: ``torch.<device>.current_stream``, else ``torch.accelerator.current_stream``.
        CPU: the innermost ``with acc.stream(…)`` of this thread, else the default stream.
        CUDA: ``torch.cuda.current_stream``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        index = self._index(device_index)
        current = self._offered("current_stream")
        if current is None or self.Stream is host.HostStream:
            return host.current_host_stream()
        return current(index)

    def default_stream(self, device_index: DeviceLike = None) -> Any:
        """The stream that is current where none was chosen; an object of :attr:`Stream`.

        Delegates to: ``torch.<device>.default_stream``, else stream 0 of the device.
        CPU: one for the process.
        CUDA: ``torch.cuda.default_stream``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        index = self._index(device_index)
        if self.Stream is host.HostStream:
            return host.default_host_stream()
        default = getattr(self.torch_module, "default_stream", None)
        if default is not None:
            return default(index)
        # torch's convention for every device type (c10::Stream::DEFAULT): id 0 is the default stream.
        # torch.xpu and torch.accelerator have no function that returns it.
        current = self.current_stream(index)
        return self.Stream(stream_id=0, device_index=index, device_type=current.device_type)

    def set_stream(self, stream: Any | None) -> None:
        """Makes a stream the current one, until another is set; ``None`` changes nothing.

        Delegates to: ``torch.<device>.set_stream``, else ``torch.accelerator.set_stream``.
        CPU: remembered for :meth:`current_stream`.
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
