"""Intel Gaudi (Habana) HPUs, through SynapseAI's habana_frameworks."""

from __future__ import annotations

from acclimate.accelerator import Accelerator


class HPUAccelerator(Accelerator):
    """Follows torch's device conventions."""

    device_type = "hpu"
    communication_backend = "hccl"
    visible_devices_variable = "HABANA_VISIBLE_MODULES"
    exported_variable_prefixes = ("HABANA", "HCCL", "PT_HPU")
