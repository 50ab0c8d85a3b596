"""Apple GPUs, through Metal."""

from __future__ import annotations

import platform
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from acclimate.accelerator import Accelerator, DeviceLike, DeviceProperties
from acclimate.backends import builtin
from acclimate.backends.staged import staged_for


class MPSAccelerator(Accelerator):
    """One device, whose module has its own memory figures and no functions that take a device.

    Streams and events are torch's generic ones: ``torch.mps`` has streams only from torch 2.15 on, and its
    events work only on the default stream.
    """

    device_type = "mps"
    _record = builtin("mps")

    @property
    def communication_backend(self) -> str:
        """``"staged"``: gloo takes no tensors on Metal, and torch has no other backend for them."""
        return staged_for("mps")

    def is_fp64_supported(self) -> bool:
        return False  # Metal has no float64

    def toolkit_version(self) -> str | None:
        return platform.mac_ver()[0] or None  # Metal comes with macOS

    def get_device_properties(self, device: DeviceLike = None) -> DeviceProperties:
        metal = torch.backends.mps
        cores, memory = metal.get_core_count(), self._memory_info(self._index(device))[1]
        return DeviceProperties(metal.get_name(), memory, multi_processor_count=cores)

    def default_generator(self, device_index: DeviceLike = None) -> torch.Generator:
        self._index(device_index)
        generator: torch.Generator = self.torch_module._get_default_mps_generator()
        return generator

    # -- memory: torch.mps reports present allocations, but no peaks -----------------------------------

    def _statistics(self, index: int) -> dict[str, Any]:
        return super()._statistics(index) or {
            "allocated_bytes.all.current": int(self.torch_module.current_allocated_memory()),
            "reserved_bytes.all.current": int(self.torch_module.driver_allocated_memory()),
        }

    def _memory_info(self, index: int) -> tuple[int, int]:
        # Metal's recommended limit for a process; the memory is shared with the host.
        total = int(self.torch_module.recommended_max_memory())
        return max(0, total - int(self.torch_module.driver_allocated_memory())), total

    def _pins_host_memory(self) -> bool:
        # The memory is the host's, so nothing is gained. In torch, `pin_memory` raises here, and
        # `torch.empty(device="cpu", pin_memory=True)` is on "mps" (pytorch issues 86060 and 181374).
        return False

    # -- streams -------------------------------------------------------------------------------------

    def _stream_class(self, name: str) -> type[Any]:
        return torch.Event if name == "Event" else _metal_stream(torch.Stream)

    def stream(self, stream: Any | None) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else stream

    def current_stream(self, device_index: DeviceLike = None) -> Any:
        self._index(device_index)
        current = torch.accelerator.current_stream()
        return self.Stream(current.stream_id, current.device_index, current.device_type)

    def default_stream(self, device_index: DeviceLike = None) -> Any:
        current = self.current_stream(device_index)
        return self.Stream(0, current.device_index, current.device_type)

    def set_stream(self, stream: Any | None) -> None:
        if stream is not None:
            torch.accelerator.set_stream(stream)


@cache
def _metal_stream(generic: type[Any]) -> type[Any]:
    class MetalStream(generic):  # type: ignore[misc]
        """torch's stream with the two methods that torch does not implement for Metal."""

        def query(self) -> bool:
            return bool(self.record_event().query())

        def synchronize(self) -> None:
            self.record_event().synchronize()

    return MetalStream
