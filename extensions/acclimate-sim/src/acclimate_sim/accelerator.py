"""The emulated accelerator, as acclimate sees it."""

from __future__ import annotations

from acclimate import Accelerator
from acclimate_sim import collectives
from acclimate_sim.device import DEVICE_TYPE, make_device


class SimAccelerator(Accelerator):
    """Follows torch's device conventions throughout: the device itself is in ``csrc``."""

    device_type = DEVICE_TYPE
    communication_backend = collectives.NAME
    op_builder_package = "acclimate_sim.ops"
    op_builders = {  # noqa: RUF012 - a ClassVar by the interface
        **Accelerator.op_builders,
        "RMSNormBuilder": "acclimate_sim.ops.rms_norm:RMSNormBuilder",
    }

    def __init__(self) -> None:
        make_device(self)
