"""What torch's own Python computes in float64, on every device but those it names.

torch formats a tensor, and inverts the scale of its gradient scaler, in float64, with an exception by name
for Apple's GPUs, which have none. There is no way to ask for the exception, so it is made here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch._tensor_str as formatting
from torch.overrides import TorchFunctionMode


def register(device_type: str, has_float64: bool) -> None:
    """Makes tensors print whatever the device refuses, and torch's gradient scaler work without float64.

    Args:
        device_type: torch's name for the device.
        has_float64: whether the device has it.
    """
    _format_on_host(device_type)
    if not has_float64:
        _invert_scale_in_float32(device_type)


def _format_on_host(device_type: str) -> None:
    # As torch does for XLA, IPU and MTIA, by a list of names of its own.
    format_values: Any = formatting._tensor_str

    @functools.wraps(format_values)
    def format_copy(self: torch.Tensor, indent: int) -> Any:
        return format_values(self.cpu() if self.device.type == device_type else self, indent)

    formatting._tensor_str = format_copy


def _invert_scale_in_float32(device_type: str) -> None:
    unscale: Any = torch.amp.GradScaler.unscale_

    @functools.wraps(unscale)
    def unscale_in_float32(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        with _Float32(device_type):
            unscale(self, optimizer)

    torch.amp.GradScaler.unscale_ = unscale_in_float32  # type: ignore[method-assign]


class _Float32(TorchFunctionMode):
    """Within it ``Tensor.double()`` of a tensor on the device gives float32."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.double and args[0].device.type == self._device_type:
            return args[0].float()
        return func(*args, **(kwargs or {}))
