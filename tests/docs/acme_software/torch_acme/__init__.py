"""The package of a made-up vendor that gives torch its device: here, the emulated one under another name.

Follows torch's conventions for devices but for one function, as real vendors' packages do.
"""

from __future__ import annotations

import os
import types

import torch

from acclimate.backends.cpu import CPUAccelerator
from acclimate_sim import torch_module
from acclimate_sim.device import make_device
from acclimate_sim.profile import VISIBLE_DEVICES


def manual_seed(seed: int) -> None:
    """Seeds every card, where torch's own functions of this name seed the current device."""
    torch_module.manual_seed_all(seed)


if "ACME_VISIBLE_DEVICES" in os.environ:
    os.environ[VISIBLE_DEVICES] = os.environ["ACME_VISIBLE_DEVICES"]
acme = types.ModuleType("torch.acme")
vars(acme).update(vars(torch_module) | {"__name__": "torch.acme", "manual_seed": manual_seed})
make_device(CPUAccelerator(), device_type="acme", module=acme, communication_backend="accl")
torch.acme = acme
