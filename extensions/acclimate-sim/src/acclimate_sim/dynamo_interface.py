"""The device's ``DeviceInterface`` for dynamo, which calls ``torch.accelerator``. Imports dynamo."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo import device_interface
from torch.accelerator import current_device_index, set_device_index


def _module() -> Any:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None  # it is registered when the device is made
    return torch.get_device_module(accelerator)


def _exchange_device(device: int) -> int:
    before = current_device_index()
    if device >= 0:
        set_device_index(device)
    return before


def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
    torch.accelerator.set_stream(
        torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
    )


def _raw_stream(device: int) -> int:
    return torch.accelerator.current_stream(device).stream_id


def _device_properties(device: Any = None) -> Any:
    return _module().get_device_properties(device)


def _supports(dtype: torch.dtype, including_emulation: bool = False) -> bool:
    capability: Any = torch.accelerator.get_device_capability(0)
    return dtype in capability["supported_dtypes"]


def _no_capability(device: Any = None) -> str:
    return ""  # the device has only one generation


class SimInterface(device_interface.DeviceInterface):
    """Devices, streams and dtypes of the emulated device, under whatever name it has."""

    Event = torch.Event
    Stream = torch.Stream

    class device(torch.accelerator.device_index):  # noqa: N801 - dynamo's name for it
        """A context manager within which a device is the current one."""

        def __init__(self, device: Any) -> None:
            super().__init__(device if isinstance(device, int) else torch.device(device).index)

    class Worker:
        """The functions that a compile worker process calls."""

        set_device = staticmethod(set_device_index)
        current_device = staticmethod(current_device_index)
        get_device_properties = staticmethod(_device_properties)

    current_device = staticmethod(current_device_index)
    set_device: Any = staticmethod(set_device_index)
    exchange_device = staticmethod(_exchange_device)
    maybe_exchange_device = staticmethod(_exchange_device)
    device_count = staticmethod(torch.accelerator.device_count)
    is_available = staticmethod(torch.accelerator.is_available)
    stream = staticmethod(lambda stream: stream)
    current_stream = staticmethod(torch.accelerator.current_stream)
    set_stream = staticmethod(torch.accelerator.set_stream)
    _set_stream_by_id = staticmethod(_set_stream_by_id)
    get_raw_stream: Any = staticmethod(_raw_stream)
    synchronize: Any = staticmethod(torch.accelerator.synchronize)
    memory_allocated: Any = staticmethod(torch.accelerator.memory_allocated)
    get_compute_capability = staticmethod(_no_capability)
    is_bf16_supported = staticmethod(lambda including_emulation=False: _supports(torch.bfloat16))
    is_dtype_supported = staticmethod(_supports)


def register_interface(device_type: str) -> None:
    """Registers the device with dynamo, by its name and by its name with each index."""
    # torch registers its own interfaces at the first lookup, and would overwrite one with the same name.
    device_interface.get_registered_device_interfaces()
    names = [device_type, *(f"{device_type}:{i}" for i in range(torch.accelerator.device_count()))]
    for name in names:
        device_interface.register_interface_for_device(name, SimInterface)
