"""The interface: what any accelerator can be asked, with a default for everything that can have one.

:class:`Accelerator` is one class in parts, one module a category. A backend declares two things
(``device_type``, ``communication_backend``) and overrides only where its hardware differs from torch's
conventions. A new method always ships with a default, so that an extension written today still loads
tomorrow.

Every method's docstring says what it means, in which unit, what it delegates to, and what CPU and CUDA do;
``docs/interface.md`` is made from them.
"""

from __future__ import annotations

from acclimate.imports import import_torch_alone, load_torch_packages

import_torch_alone()  # before the modules below do

from acclimate.accelerator.devices import DeviceLike, DeviceProperties, Devices
from acclimate.accelerator.dtypes import DataTypes, TensorType
from acclimate.accelerator.graphs import Graphs
from acclimate.accelerator.host import HostEvent, HostStream
from acclimate.accelerator.memory import Memory
from acclimate.accelerator.mixed_precision import MixedPrecision
from acclimate.accelerator.ops import Ops
from acclimate.accelerator.pinning import Pinning
from acclimate.accelerator.random import RandomNumbers
from acclimate.accelerator.recorded_graph import RecordedGraph
from acclimate.accelerator.runtime import Runtime
from acclimate.accelerator.streams import Streams

__all__ = [
    "Accelerator",
    "DeviceLike",
    "DeviceProperties",
    "HostEvent",
    "HostStream",
    "MixedPrecision",
    "RecordedGraph",
    "TensorType",
]

CATEGORIES: tuple[type[Devices], ...] = (
    Devices,
    RandomNumbers,
    Streams,
    Memory,
    DataTypes,
    Graphs,
    Pinning,
    Ops,
    Runtime,
)
"""The parts of the interface, in the order of the documentation."""


class Accelerator(RandomNumbers, Graphs, Streams, Memory, DataTypes, Pinning, Ops, Runtime):
    """One kind of device that torch computes on.

    Types are exact and the same on every backend: ``current_device()`` is an ``int``, ``device()`` a context
    manager, ``is_*()`` a ``bool``, sizes are bytes.

    The docstrings' lines mean: *Delegates to*, the torch call used where the backend does not override it
    (``torch.<device>`` is torch's module for the device type); *CPU* and *CUDA*, what those two do.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


load_torch_packages()  # last: one of them may import this module
