"""Intel GPUs, through torch itself or Intel Extension for PyTorch."""

from __future__ import annotations

import torch

from acclimate.accelerator import Accelerator
from acclimate.backends import builtin


class XPUAccelerator(Accelerator):
    """Follows torch's device conventions, and reports float16 and float64 from the device's properties."""

    device_type = "xpu"
    _record = builtin("xpu")

    _processors_field = "gpu_subslice_count"  # Xe cores, as torch counts them for torch.compile

    @property
    def communication_backend(self) -> str:
        """xccl if torch was built with it, else oneCCL's bindings."""
        xccl = torch.distributed.is_available() and torch.distributed.is_xccl_available()
        return "xccl" if xccl else "ccl"

    def is_fp16_supported(self) -> bool:
        return self._device_says("has_fp16")

    def is_fp64_supported(self) -> bool:
        return self._device_says("has_fp64")  # Arc GPUs at most emulate float64

    def _device_says(self, property_name: str) -> bool:
        if not self.is_available():
            return False
        properties = self.torch_module.get_device_properties(self.current_device())
        return bool(getattr(properties, property_name, False))


class ExternalXPUAccelerator(XPUAccelerator):
    """The same devices, through Intel Extension for DeepSpeed."""

    name = "xpu.external"
    _record = builtin("xpu.external")
