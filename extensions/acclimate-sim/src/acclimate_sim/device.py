"""Makes the device: loads its library, names its type ``sim``, and gives torch the module for it."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from acclimate_sim import (
    collectives,
    compiling,
    float64_inside_torch,
    lists_of_devices,
    safetensors_names,
    torch_module,
    untied_weights,
)
from acclimate_sim.errors import DeviceInUseError
from acclimate_sim.library import NAMED_SLOTS, open_device_library
from acclimate_sim.profile import Profile, read_profile

if TYPE_CHECKING:
    from acclimate import Accelerator

DEVICE_TYPE = "sim"

_lock = threading.Lock()
_made = False


def make_device(
    accelerator: Accelerator,
    device_type: str = DEVICE_TYPE,
    module: ModuleType = torch_module,
    communication_backend: str = collectives.NAME,
) -> None:
    """Gives this process the device type ``sim``; the first call does it, later ones return at once.

    Under another name it stands in for a vendor's device, which shows what code for that one does.

    Args:
        accelerator: whose compiler builds the library where it was not built yet.
        device_type: torch's name for the device. One that torch knows already is taken over, on a torch
            without support for that hardware, where nothing asked for it before.
        module: what becomes ``torch.<device_type>``.
        communication_backend: its name for ``torch.distributed``.

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
        open_device_library(accelerator, device_type)
        _configure(profile)
        if device_type in NAMED_SLOTS:
            setattr(torch, device_type, module)
            sys.modules[f"torch.{device_type}"] = module
        else:
            rename_privateuse1_backend(device_type)
            torch._register_device_module(device_type, module)
            generate_methods_for_privateuse1_backend(for_storage=True)
            lists_of_devices.register(device_type, module)
        collectives.register(communication_backend, device_type)
        compiling.register(device_type)
        safetensors_names.register(device_type)
        float64_inside_torch.register(device_type, has_float64="float64" not in profile.refused)
        if profile.replaces_parameters:
            untied_weights.register()
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
