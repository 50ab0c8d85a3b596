"""Intel GPUs, through torch itself or Intel Extension for PyTorch."""

from __future__ import annotations

import torch

from acclimate.accelerator import Accelerator


class XPUAccelerator(Accelerator):
    """Follows torch's device conventions."""

    device_type = "xpu"
    visible_devices_variable = "ZE_AFFINITY_MASK"
    exported_variable_prefixes = ("CCL_", "FI_", "I_MPI_", "ONEAPI_", "SYCL_", "UR_", "ZE_")

    @property
    def communication_backend(self) -> str:
        """xccl where torch was built with it, else oneCCL's bindings."""
        xccl = torch.distributed.is_available() and torch.distributed.is_xccl_available()
        return "xccl" if xccl else "ccl"


class ExternalXPUAccelerator(XPUAccelerator):
    """The same devices, where Intel Extension for DeepSpeed brings them."""

    name = "xpu.external"
