"""Installs a stand-in in this process, as a build of torch or a vendor's package does at import."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from stand_ins import executed
from stand_ins.ways import WAYS

VARIABLE = "STAND_IN"
"""Which of the ways this process has."""


def install() -> None:
    """Called by torch at the end of its import, as it calls every package that brings a device."""
    way = WAYS[os.environ[VARIABLE]]
    import torch

    from acclimate.backends.cpu import CPUAccelerator
    from acclimate_sim import profile
    from acclimate_sim.device import make_device
    from stand_ins import built, emulated, vendors
    from stand_ins.module import StandInModule, internals, submodules
    from stand_ins.surface import read_surface

    if way.visible_devices in os.environ:
        os.environ[profile.VISIBLE_DEVICES] = os.environ[way.visible_devices]
    real = sys.modules.get(f"torch.{way.device_type}")
    surface = read_surface(way.surface)
    placeholder = ModuleType(f"torch.{way.device_type}")
    for name, value in emulated.asked_by_torch(way.device_type).items():
        setattr(placeholder, name, value)  # torch asks for these when the first generator is made
    make_device(CPUAccelerator(), way.device_type, placeholder, way.communication or "unused")
    private = {**internals(real), **emulated.asked_by_torch(way.device_type)}
    emulation = {**submodules(real), **vendors.emulation(way.device_type)}
    made = StandInModule(f"torch.{way.device_type}", surface.names, emulation, private)
    for name in {"get_rng_state", "set_rng_state"} & emulation.keys():
        setattr(placeholder, name, emulation[name])  # a checkpoint that torch compiles keeps the placeholder
    setattr(torch, way.device_type, made)
    sys.modules[made.__name__] = made
    built.pretend(way)
    executed.watch(way.backend)


def module(name: str) -> Any:
    """What a vendor's own package has under a name: the same as torch's module for the device."""
    import torch

    return getattr(getattr(torch, WAYS[os.environ[VARIABLE]].device_type), name)
