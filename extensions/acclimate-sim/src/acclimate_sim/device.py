"""Creates the device: loads its library, names its type ``sim``, and registers its module with torch."""

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
    sharing,
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
    """Registers the device type ``sim`` in this process; only the first call has an effect.

    With another name it replaces a vendor's device, to try out code for that device.

    Args:
        accelerator: its compiler builds the library if it is not built yet.
        device_type: torch's name for the device. It may be a name that torch has already, if this torch is
            built without that hardware and no code has used it yet.
        module: the module ``torch.<device_type>``.
        communication_backend: its name in ``torch.distributed``.

    Raises:
        ProfileError: ``ACCLIMATE_SIM`` has an invalid value.
        DeviceInUseError: another package has registered torch's one out-of-tree device type (PrivateUse1).
    """
    global _made
    with _lock:
        if _made:
            return
        profile = read_profile()
        taken = torch._C._get_privateuse1_backend_name()
        if taken != "privateuseone":
            raise DeviceInUseError(
                f'torch has one out-of-tree device type per process (PrivateUse1), and here it is "{taken}". '
                f'Use sim in a process that does not import the package of "{taken}".'
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
        sharing.register(device_type)
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
        profile.asserts,
    )
