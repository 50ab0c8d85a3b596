"""The accelerator's record, which acclimate reads before selecting it. Does not import torch."""

from __future__ import annotations

from acclimate import AcclimateError, Backend
from acclimate_sim.profile import VARIABLE, VISIBLE_DEVICES, read_profile


def _why_not() -> str | None:
    try:
        read_profile()
    except AcclimateError as error:
        return str(error)
    return None


BACKEND = Backend(
    name="sim",
    target="acclimate_sim.accelerator:SimAccelerator",
    probe=_why_not,
    rank=900,
    device_count=lambda: read_profile().devices,
    auto_detect=False,  # a program must never detect an emulator by itself
    remedy="Correct ACCLIMATE_SIM",
    visible_devices_variable=lambda: VISIBLE_DEVICES,
    exported_variable_prefixes=(VARIABLE,),
)
