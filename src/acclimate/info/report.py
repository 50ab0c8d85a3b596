"""Collects the report: the accelerator, its devices, and why others cannot be used."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from acclimate.errors import AcclimateError
from acclimate.host import topology
from acclimate.imports import describe, import_torch
from acclimate.selection import Candidate, chosen_by, detect_all, get_accelerator

if TYPE_CHECKING:
    from acclimate.accelerator import Accelerator


@dataclass(frozen=True)
class Device:
    """One device of the accelerator."""

    name: str
    """torch's name."""
    product: str
    """The vendor's name."""
    total_memory: int
    """Bytes."""
    available_memory: int
    """Bytes."""


@dataclass(frozen=True)
class Chosen:
    """The accelerator of this process."""

    name: str
    device_type: str
    chosen_by: str
    devices: list[Device]
    supported_dtypes: list[str]
    communication_backend: str
    compile_backend: str
    visible_devices_variables: list[str]
    triton: bool
    toolkit_version: str | None
    """The version of the vendor's software below torch, if known."""


@dataclass(frozen=True)
class Host:
    """The host's resources that this process may use."""

    processors: int
    memory_nodes: int
    processor_quota: float | None
    """The number of processors' time that a cgroup allows, if it is limited."""
    total_memory: int
    """Bytes, within this process's cgroups."""
    available_memory: int
    """Bytes, within this process's cgroups."""


@dataclass(frozen=True)
class Report:
    """The content of ``acclimate info``."""

    acclimate: str
    torch: str
    python: str
    system: str
    host: Host
    accelerator: Chosen | None
    """``None`` if it cannot be used or described; :attr:`error` then says why."""
    error: str | None
    candidates: list[Candidate] = field(default_factory=list)
    """All records, in the order of detection."""

    def as_dict(self) -> dict[str, object]:
        """Returns nested dicts and lists, for JSON."""
        return asdict(self)


def collect() -> Report:
    """Selects this process's accelerator and probes all others."""
    import_torch()
    import torch

    from acclimate import __version__

    chosen, error = None, None
    try:
        chosen = _describe(get_accelerator())
    except AcclimateError as problem:
        error = str(problem)
    except Exception as problem:  # noqa: BLE001 - the report must show a failing driver
        error = f"The accelerator was selected, but querying its devices failed: {describe(problem)}"
    return Report(
        acclimate=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        host=_host(),
        accelerator=chosen,
        error=error,
        candidates=detect_all(),
    )


def _host() -> Host:
    found = topology.read_topology()
    return Host(
        processors=len(found.allowed_cpus),
        memory_nodes=topology.usable_node_count(),
        processor_quota=topology.cpu_quota() if sys.platform == "linux" else None,
        total_memory=topology.total_memory(),
        available_memory=topology.available_memory(),
    )


def _describe(accelerator: Accelerator) -> Chosen:
    # All devices of the CPU have the same name in torch.
    indices = range(accelerator.device_count())
    names = dict.fromkeys(accelerator.device_name(index) for index in indices)
    return Chosen(
        name=accelerator.name,
        device_type=accelerator.device_type,
        chosen_by=chosen_by(),
        devices=[
            Device(
                name=name,
                product=accelerator.get_device_name(name),
                total_memory=accelerator.total_memory(name),
                available_memory=accelerator.available_memory(name),
            )
            for name in names
        ],
        supported_dtypes=[str(dtype).removeprefix("torch.") for dtype in accelerator.supported_dtypes()],
        communication_backend=accelerator.communication_backend_name(),
        compile_backend=accelerator.get_compile_backend(),
        visible_devices_variables=accelerator.visible_devices_envs(),
        triton=accelerator.is_triton_supported(),
        toolkit_version=accelerator.toolkit_version(),
    )
