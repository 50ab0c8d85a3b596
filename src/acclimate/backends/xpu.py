"""Intel GPUs, through torch itself or Intel Extension for PyTorch."""

from __future__ import annotations

import torch

from acclimate.accelerator import Accelerator
from acclimate.backends import builtin


class XPUAccelerator(Accelerator):
    """Follows torch's device conventions; says itself which data types it computes in."""

    device_type = "xpu"
    _record = builtin("xpu")

    _processors_field = "gpu_subslice_count"  # Xe cores, as torch counts them for torch.compile

    @property
    def communication_backend(self) -> str:
        """xccl where torch was built with it, else oneCCL's bindings."""
        xccl = torch.distributed.is_available() and torch.distributed.is_xccl_available()
        return "xccl" if xccl else "ccl"

    def is_bf16_supported(self) -> bool:
        told = getattr(self.torch_module, "is_bf16_supported", None)
        # torch counts emulation unless asked not to. Intel Extension for PyTorch has no such function.
        return bool(told(including_emulation=False)) if told is not None else super().is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return self._device_says("has_fp16")

    def is_fp64_supported(self) -> bool:
        return self._device_says("has_fp64")  # Arc GPUs compute in float64 by emulation only, if at all

    def _device_says(self, property_name: str) -> bool:
        if not self.is_available():
            return False
        properties = self.torch_module.get_device_properties(self.current_device())
        return bool(getattr(properties, property_name, False))


class ExternalXPUAccelerator(XPUAccelerator):
    """The same devices, where Intel Extension for DeepSpeed brings them."""

    name = "xpu.external"
    _record = builtin("xpu.external")
