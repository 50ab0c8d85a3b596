"""Devices: names, the current device, properties and synchronisation.

Also the two rules that all categories of the interface use: how a device argument becomes an index
(``_index``), and where a method looks for a function of torch (``_offered``).
"""

from __future__ import annotations

import functools
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch

from acclimate.errors import InvalidDeviceError, excerpt

DeviceLike: TypeAlias = "int | str | torch.device | None"
"""A device argument as in torch: an index, a name, a ``torch.device``, or ``None`` (the current device)."""


@dataclass(frozen=True)
class DeviceProperties:
    """The properties of a device whose torch module has none, named as in CUDA's."""

    name: str
    """The vendor's name for the device."""
    total_memory: int
    """Bytes of memory."""
    multi_processor_count: int = 1
    """The number of independent processors; on a host, of cores that this process may use."""
    major: int = 0
    """First number of the compute capability; 0 if the vendor has none."""
    minor: int = 0
    """Second number of the compute capability."""


class Devices(ABC):
    """Naming, choosing and waiting for devices."""

    # -- what a backend declares -----------------------------------------------------------------

    @property
    @abstractmethod
    def device_type(self) -> str:
        """torch's name for this kind of device, as in ``torch.device(device_type)``.

        CPU: ``"cpu"``.
        CUDA: ``"cuda"``, also on ROCm builds of torch.
        """

    @property
    def name(self) -> str:
        """The name of the accelerator's record, which ``DS_ACCELERATOR`` takes; may differ from
        :attr:`device_type`, as ``xpu.external`` does.

        CPU: ``"cpu"``.
        CUDA: ``"cuda"``.
        """
        return self.device_type

    @functools.cached_property  # which a subclass or an object can set
    def _name(self) -> str:
        """:attr:`device_type`, for programs that read this of DeepSpeed's accelerators."""
        return self.device_type

    _processors_field: ClassVar[str] = "multi_processor_count"
    """The field of the vendor's properties with the number of a device's independent processors."""

    # -- torch's functions for the device --------------------------------------------------------

    @property
    def torch_module(self) -> types.ModuleType:
        """torch's module for :attr:`device_type`; an empty module if there is none.

        Delegates to: ``torch.get_device_module``.
        CPU: ``torch.cpu``.
        CUDA: ``torch.cuda``.
        """
        module = getattr(torch, self.device_type, None)
        return module if module is not None else types.ModuleType(f"torch.{self.device_type}")

    def _offered(self, name: str, generic_name: str | None = None) -> Callable[..., Any] | None:
        """Returns the function ``name`` of the device's torch module or of ``torch.accelerator``, or None.

        The vendor's module comes first because it exists on every torch release, while ``torch.accelerator``
        serves only torch's current accelerator. The lookup is repeated at each call, since a module that
        initialises lazily may get functions later.
        """
        function = getattr(self.torch_module, name, None)
        if function is None and self._is_torch_accelerator():
            function = getattr(torch.accelerator, generic_name or name, None)
        return function

    def _is_torch_accelerator(self) -> bool:
        current = torch.accelerator.current_accelerator()
        return current is not None and current.type == self.device_type

    def _index(self, device: DeviceLike = None) -> int:
        """Returns the index of a device argument.

        Raises:
            InvalidDeviceError: the device has another type, or does not exist.
        """
        if device is None:
            return self.current_device()
        if isinstance(device, int):
            index = device
        else:
            named = self._named_device(device)
            index = self.current_device() if named.index is None else named.index
        count = self.device_count()
        if not 0 <= index < count:
            known = f"0 to {count - 1}" if count > 1 else "only 0" if count else "none"
            raise InvalidDeviceError(
                f"The {self.name} accelerator has no device {index}; devices that exist here: {known}."
            )
        return index

    def _named_device(self, device: str | torch.device) -> torch.device:
        """Returns the device with this name.

        Raises:
            InvalidDeviceError: it names no device, or one of another type.
        """
        try:
            named = torch.device(device)
        except RuntimeError:  # torch knows no such type
            named = None
        if named is None or named.type != self.device_type:
            raise InvalidDeviceError(
                f'"{excerpt(str(device))}" is not a device of the {self.name} accelerator; '
                f'its devices have names like "{self.device_name(0)}".'
            )
        return named

    # -- the interface ---------------------------------------------------------------------------

    def is_synchronized_device(self) -> bool:
        """Whether every operation has finished when its Python call returns.

        CPU: true.
        CUDA: false.
        """
        return False

    def use_host_timers(self) -> bool:
        """Whether the host's clock measures device work correctly without synchronising.

        CPU: true.
        CUDA: false.
        """
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """Whether one stream can use results of another without an explicit wait.

        CPU: true.
        CUDA: false.
        """
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Whether the device itself throttles a producer before memory runs out.

        CPU: true.
        CUDA: false.
        """
        return self.is_synchronized_device()

    def device_name(self, device_index: int | None = None) -> str:
        """The name of a device in torch: the type alone, or with an index.

        CPU: always ``"cpu"``.
        CUDA: ``"cuda"`` or ``"cuda:1"``.
        """
        return self.device_type if device_index is None else f"{self.device_type}:{device_index}"

    def device(self, device_index: DeviceLike = None) -> AbstractContextManager[Any]:
        """A context manager that makes ``device_index`` the current device; ``None`` changes nothing.

        Delegates to: ``torch.<device>.device``, else ``torch.accelerator.device_index``.
        CPU: does nothing, since the host is one device in torch.
        CUDA: ``torch.cuda.device``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        if device_index is None:
            return nullcontext()
        index = self._index(device_index)
        switch = self._offered("device", "device_index")
        return switch(index) if switch is not None else nullcontext()

    def set_device(self, device_index: DeviceLike) -> None:
        """Makes a device this thread's current device.

        Delegates to: ``torch.<device>.set_device``, else ``torch.accelerator.set_device_index``.
        CPU: does nothing.
        CUDA: ``torch.cuda.set_device``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        index = self._index(device_index)
        select = self._offered("set_device", "set_device_index")
        if select is not None:
            select(index)

    def current_device(self) -> int:
        """The index of the current device.

        Delegates to: ``torch.<device>.current_device``, else ``torch.accelerator.current_device_index``.
        CPU: ``LOCAL_RANK`` in a launched rank, else 0.
        CUDA: ``torch.cuda.current_device``.
        """
        current = self._offered("current_device", "current_device_index")
        return int(current()) if current is not None else 0

    def current_device_name(self) -> str:
        """The current device as a string for ``device=``, such as ``"cuda:0"``.

        CPU: ``"cpu"``.
        CUDA: ``"cuda:<index>"``.
        """
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """The number of devices that this process can use.

        Delegates to: ``torch.<device>.device_count``, else ``torch.accelerator.device_count``.
        CPU: ``LOCAL_WORLD_SIZE`` (or ``LOCAL_SIZE``) in a launched rank, else the number of memory nodes with
            a core that this process may use.
        CUDA: ``torch.cuda.device_count``, which queries the driver's management library, so that a later fork
            is safe.
        """
        count = self._offered("device_count")
        return int(count()) if count is not None else 0

    def is_available(self) -> bool:
        """Whether at least one device can be used.

        Delegates to: ``torch.<device>.is_available``, else ``torch.accelerator.is_available``.
        CPU: true.
        CUDA: whether :meth:`device_count` is above 0; creates no context, unlike
            ``torch.cuda.is_available``.
        """
        available = self._offered("is_available")
        return bool(available()) if available is not None else self.device_count() > 0

    def is_initialized(self) -> bool:
        """Whether this process has a context of the device, after which a fork is unsafe.

        Delegates to: ``torch.<device>.is_initialized``.
        CPU: true.
        CUDA: ``torch.cuda.is_initialized``.
        """
        initialized = self._offered("is_initialized")
        return bool(initialized()) if initialized is not None else True

    def init(self) -> None:
        """Creates the device's context now instead of on first use.

        Delegates to: ``torch.<device>.init``.
        CPU: does nothing.
        CUDA: ``torch.cuda.init``.
        """
        init = self._offered("init")
        if init is not None:
            init()

    def synchronize(self, device_index: DeviceLike = None) -> None:
        """Waits until all work queued on a device is done.

        Delegates to: ``torch.<device>.synchronize``, else ``torch.accelerator.synchronize``.
        CPU: returns at once.
        CUDA: ``torch.cuda.synchronize``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        if device_index is None:
            self._wait_for_current_device()
            return
        index = self._index(device_index)
        with self.device(index):
            self._wait_for_current_device()

    def _wait_for_current_device(self) -> None:
        wait = self._offered("synchronize")
        if wait is None:
            return
        try:
            wait()  # without an argument, which torch.mps does not take: all wait for the current device
        except RuntimeError as error:
            # The message of c10's device guard if a device does not implement the function.
            if "Backend doesn't support" not in str(error):
                raise
            torch.zeros(1, device=self.device_type).cpu()  # waits for all earlier work in its one queue

    def get_device_properties(self, device: DeviceLike = None) -> Any:
        """The properties of a device: an object with at least ``name`` (str), ``total_memory`` (bytes),
        ``multi_processor_count``, ``major`` and ``minor`` (int).

        Delegates to: ``torch.<device>.get_device_properties``, with missing fields added.
        CPU: :class:`DeviceProperties` with the processor's model name.
        CUDA: ``torch.cuda.get_device_properties``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        index = self._index(device)
        properties = self._offered("get_device_properties")
        found = properties(index) if properties is not None else {}
        required = ("name", "total_memory", "multi_processor_count", "major", "minor")
        if all(hasattr(found, field) for field in required):
            return found
        known = found if isinstance(found, dict) else {k: getattr(found, k) for k in dir(found)}
        capability = self.get_device_capability(index)
        name = self._offered("get_device_name")
        return DeviceProperties(
            name=str(known.get("name", name(index) if name is not None else self.device_name(index))),
            total_memory=int(known.get("total_memory", self._memory_info(index)[1])),
            multi_processor_count=int(known.get(self._processors_field, 1)),
            major=int(known.get("major", capability[0])),
            minor=int(known.get("minor", capability[1])),
        )

    def get_device_name(self, device: DeviceLike = None) -> str:
        """The vendor's name for a device, such as ``"NVIDIA H100 80GB HBM3"``.

        For torch's name, see :meth:`device_name`.

        Delegates to: ``torch.<device>.get_device_name``, else :meth:`get_device_properties`.
        CPU: the processor's model name.
        CUDA: ``torch.cuda.get_device_name``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        index = self._index(device)
        name = self._offered("get_device_name")
        return str(name(index)) if name is not None else str(self.get_device_properties(index).name)

    def get_device_capability(self, device: DeviceLike = None) -> tuple[int, int]:
        """The compute capability as ``(major, minor)``; ``(0, 0)`` if the vendor has none, so that
        ``capability >= (8, 0)`` is false.

        Delegates to: ``torch.<device>.get_device_capability`` if it returns two numbers.
        CPU: ``(0, 0)``.
        CUDA: ``torch.cuda.get_device_capability``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        index = self._index(device)
        # Not torch.accelerator's function of this name, which returns supported dtypes.
        capability = getattr(self.torch_module, "get_device_capability", None)
        found = capability(index) if capability is not None else None
        if isinstance(found, tuple) and len(found) >= 2:
            return int(found[0]), int(found[1])
        return 0, 0  # torch.xpu returns a dict of features

    @abstractmethod
    def _memory_info(self, index: int) -> tuple[int, int]:
        """Returns ``(free, total)`` bytes of a device; implemented by the memory category."""
