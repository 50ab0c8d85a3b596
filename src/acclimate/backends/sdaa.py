"""Tecorigin SDAA accelerators, through torch_sdaa."""

from __future__ import annotations

from acclimate.accelerator import Accelerator
from acclimate.backends import builtin


class SDAAAccelerator(Accelerator):
    """Follows torch's device conventions, as far as known: torch_sdaa is not public."""

    device_type = "sdaa"
    communication_backend = "tccl"
    _record = builtin("sdaa")
