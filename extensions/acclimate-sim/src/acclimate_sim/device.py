"""Makes the device: loads its library, names its type ``sim``, and gives torch the module for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from acclimate_sim import collectives, compiling, safetensors_names, torch_module
from acclimate_sim.errors import DeviceInUseError
from acclimate_sim.library import open_device_library
from acclimate_sim.profile import Profile, read_profile

if TYPE_CHECKING:
    from acclimate import Accelerator

DEVICE_TYPE = "sim"

_lock = threading.Lock()
_made = False


def make_device(accelerator: Accelerator) -> None:
    """Gives this process the device type ``sim``; the first call does it, later ones return at once.

    Args:
        accelerator: whose compiler builds the library where it was not built yet.

    Raises:
        ProfileError: ``ACCLIMATE_SIM`` says something it cannot say.
        DeviceInUseError: torch's one device type from outside belongs to another package.
    """
    global _made
    with _lock:
        if _made:
            return
        profile = read_profile()
        taken = torch._C._get_privateuse1_backend_name()
        if taken != "privateuseone":
            raise DeviceInUseError(
                f'torch has one device type from outside per process, and it is "{taken}" here. '
                "Use sim in a process that does not import that package."
            )
        open_device_library(accelerator)
        _configure(profile)
        rename_privateuse1_backend(DEVICE_TYPE)
        torch._register_device_module(DEVICE_TYPE, torch_module)
        generate_methods_for_privateuse1_backend(for_storage=True)
        collectives.register()
        compiling.register()
        safetensors_names.register()
        _made = True


def _configure(profile: Profile) -> None:
    refused = [torch.ops.sim.dtype_number(getattr(torch, name)) for name in sorted(profile.refused)]
    torch.ops.sim.configure(
        profile.devices,
        profile.memory_bytes,
        refused,
        profile.replaces_parameters,
        profile.checks_synchronisation,
    )
