"""Apple GPUs, through Metal."""

from __future__ import annotations

from acclimate.accelerator import Accelerator


class MPSAccelerator(Accelerator):
    """Follows torch's device conventions, on one device."""

    device_type = "mps"
    communication_backend = "gloo"
    visible_devices_variable = None

    def is_fp64_supported(self) -> bool:
        return False  # Metal has no float64
