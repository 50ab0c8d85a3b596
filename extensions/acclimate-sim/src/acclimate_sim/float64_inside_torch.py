"""Replaces float64 in torch's own Python code, for a device without float64.

torch formats tensors, and inverts the scale of its gradient scaler, in float64. It avoids float64 only for
devices that it knows by name, such as MPS, and a name cannot be added. So this module patches both functions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch._tensor_str as formatting
from torch.overrides import TorchFunctionMode


def register(device_type: str, has_float64: bool) -> None:
    """Makes tensors of a device that lacks dtypes printable, and the gradient scaler work without float64.

    Args:
        device_type: torch's name for the device.
        has_float64: whether the device has float64.
    """
    _format_on_host(device_type)
    if not has_float64:
        _invert_scale_in_float32(device_type)


def _format_on_host(device_type: str) -> None:
    # torch does so for XLA, IPU and MTIA, which it knows by name.
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
    """In this mode ``Tensor.double()`` of a tensor on the device returns float32."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.double and args[0].device.type == self._device_type:
            return args[0].float()
        return func(*args, **(kwargs or {}))
