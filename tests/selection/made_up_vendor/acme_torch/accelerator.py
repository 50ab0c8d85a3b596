"""The made-up vendor's accelerator."""

from __future__ import annotations

from acclimate import Accelerator


class AcmeAccelerator(Accelerator):
    """Follows torch's device conventions."""

    device_type = "acme"
    communication_backend = "gloo"
    visible_devices_variable = "ACME_VISIBLE_CARDS"
    op_builder_package = "acme_torch.ops"
    op_builders = {"DoubleBuilder": "acme_torch.ops:DoubleBuilder"}  # noqa: RUF012 - as in the interface
