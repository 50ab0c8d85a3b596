"""The interface of all accelerators, with a default for each method that can have one.

:class:`Accelerator` is one class, with one module for each category of methods. A backend declares
``device_type`` and ``communication_backend``, and overrides methods only where its hardware differs from
torch's conventions. A new method always has a default, so that existing extensions continue to load.

Each docstring says what the method returns, in which unit, what it delegates to, and what CPU and CUDA do;
``docs/interface.md`` is generated from them.
"""

from __future__ import annotations

from acclimate.imports import import_torch_alone, load_torch_packages

import_torch_alone()  # before the modules below import it

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
"""The categories of the interface, in the order of the documentation."""


class Accelerator(RandomNumbers, Graphs, Streams, Memory, DataTypes, Pinning, Ops, Runtime):
    """One kind of device that torch computes on.

    Return types are the same on every backend: ``current_device()`` is an ``int``, ``device()`` a context
    manager, ``is_*()`` a ``bool``, and sizes are in bytes.

    In the docstrings, *Delegates to* names the torch call used unless the backend overrides the method
    (``torch.<device>`` is torch's module for the device type); *CPU* and *CUDA* say what those two do.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


load_torch_packages()  # last: one of them may import this module
