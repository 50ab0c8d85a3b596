"""The host's processors, the fallback on every machine.

Devices are memory nodes with cores that this process may use. In torch the host is a single device, so device
indices have no effect. Memory figures are this process's resident set, since the allocator keeps none.
"""

from __future__ import annotations

import functools
import os
import pkgutil
import platform
from pathlib import Path
from typing import Any

import torch

from acclimate.accelerator import Accelerator, DeviceLike, DeviceProperties
from acclimate.backends import builtin, process_memory
from acclimate.backends.presence import is_installed
from acclimate.errors import InvalidEnvironmentError, excerpt
from acclimate.host import topology

_COMMUNICATION = ("shm", "gloo", "ccl")


class CPUAccelerator(Accelerator):
    """A synchronous accelerator on host memory."""

    device_type = "cpu"
    _record = builtin("cpu")
    op_builders = {  # noqa: RUF012 - a ClassVar by the interface
        **Accelerator.op_builders,
        "FusedAdamBuilder": "acclimate.ops.optimizers.builders:CPUAdamBuilder",
        "FusedLionBuilder": "acclimate.ops.optimizers.builders:CPULionBuilder",
        "InferenceBuilder": "acclimate.llm.kernels.builder:CPUInferenceBuilder",
        "ShareMemCommBuilder": "acclimate.comm.shm_op:ShareMemCommBuilder",
        "CCLCommBuilder": "acclimate.comm.ccl_op:CCLCommBuilder",
    }

    @property
    def communication_backend(self) -> str:
        chosen = os.environ.get("ACCLIMATE_COMM", "")
        if chosen not in ("", *_COMMUNICATION):
            raise InvalidEnvironmentError(
                f"ACCLIMATE_COMM must be one of {', '.join(_COMMUNICATION)}. "
                f'Value "{chosen}" is not supported.'
            )
        if chosen == "shm":  # torch.distributed has to know the name
            pkgutil.resolve_name("acclimate.comm.backend:register")()
        return chosen or ("ccl" if _oneccl_imports() else "gloo")

    def is_synchronized_device(self) -> bool:
        return True

    # -- devices ---------------------------------------------------------------------------------

    def _index(self, device: DeviceLike = None) -> int:
        if device is not None and not isinstance(device, int):
            self._named_device(device)
        return 0

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def current_device(self) -> int:
        return _launched("LOCAL_RANK", minimum=0) or 0

    def current_device_name(self) -> str:
        return "cpu"

    @functools.cached_property
    def _usable_nodes(self) -> int:
        # Counted once: OpenMP may bind this thread to one core later, which would hide the other nodes.
        return topology.usable_node_count()

    def device_count(self) -> int:
        launched = _launched("LOCAL_WORLD_SIZE", minimum=1) or _launched("LOCAL_SIZE", minimum=1)
        return launched or self._usable_nodes

    def get_device_properties(self, device: DeviceLike = None) -> DeviceProperties:
        self._index(device)
        return DeviceProperties(
            name=_processor_name(),
            total_memory=topology.total_memory(),
            multi_processor_count=len(topology.read_topology().allowed_cpus),
        )

    # -- random numbers: torch has one generator for the host ------------------------------------

    def default_generator(self, device_index: DeviceLike = None) -> torch.Generator:
        self._index(device_index)
        return torch.default_generator

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state()]

    # -- memory ----------------------------------------------------------------------------------

    def get_rss(self) -> int:
        """The resident set of this process, in bytes."""
        return process_memory.resident_bytes()

    def memory_allocated(self, device_index: DeviceLike = None) -> int:
        self._index(device_index)
        return process_memory.resident_bytes()

    def max_memory_allocated(self, device_index: DeviceLike = None) -> int:
        self._index(device_index)
        return process_memory.peak_resident_bytes()

    def reset_peak_memory_stats(self, device_index: DeviceLike = None) -> None:
        self._index(device_index)
        process_memory.reset_peak()

    def memory_stats(self, device_index: DeviceLike = None) -> dict[str, Any]:
        self._index(device_index)
        current, peak = process_memory.resident_bytes(), process_memory.peak_resident_bytes()
        pools = ("allocated_bytes.all", "reserved_bytes.all")
        return {
            f"{pool}.{key}": size for pool in pools for key, size in (("current", current), ("peak", peak))
        }

    def _memory_info(self, index: int) -> tuple[int, int]:
        return topology.available_memory(), topology.total_memory()

    # -- data types ------------------------------------------------------------------------------

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return (
            bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
            if torch.backends.mkldnn.is_available()
            else False
        )

    def is_fp64_supported(self) -> bool:
        return True

    def _tensor_type(self, name: str, dtype: torch.dtype) -> Any:
        return getattr(torch, name)  # the host's tensor types are in torch itself, not in torch.cpu


def _launched(variable: str, minimum: int) -> int | None:
    """Returns a number that a launcher set for this rank; None outside a launched rank."""
    text = os.environ.get(variable)
    if not text:
        return None
    if not text.strip().isdecimal() or int(text) < minimum:
        raise InvalidEnvironmentError(
            f'{variable} is "{excerpt(text)}", but must be an integer of {minimum} or more. '
            "A launcher sets it for each rank; unset it to run without a launcher."
        )
    return int(text)


@functools.cache
def _oneccl_imports() -> bool:
    if not is_installed("oneccl_bindings_for_pytorch"):
        return False
    try:
        import oneccl_bindings_for_pytorch  # type: ignore[import-not-found]  # noqa: F401
    except (Exception, SystemExit):  # noqa: BLE001 - it raises anything if built for another torch; use gloo
        return False
    return True


@functools.cache
def _processor_name() -> str:
    """Returns the processor's model name, or its architecture if the kernel does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
