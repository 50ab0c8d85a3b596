"""Huawei Ascend NPUs, through torch_npu."""

from __future__ import annotations

from acclimate.accelerator import Accelerator


class NPUAccelerator(Accelerator):
    """Follows torch's device conventions."""

    device_type = "npu"
    communication_backend = "hccl"
    visible_devices_variable = "ASCEND_RT_VISIBLE_DEVICES"
    exported_variable_prefixes = ("ASCEND", "HCCL")
