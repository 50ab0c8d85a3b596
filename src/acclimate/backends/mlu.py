"""Cambricon MLUs, through torch_mlu."""

from __future__ import annotations

from acclimate.accelerator import Accelerator


class MLUAccelerator(Accelerator):
    """Follows torch's device conventions."""

    device_type = "mlu"
    communication_backend = "cncl"
    visible_devices_variable = "MLU_VISIBLE_DEVICES"
    exported_variable_prefixes = ("CNCL", "NEUWARE_HOME")
