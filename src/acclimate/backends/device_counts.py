"""Counts, from the kernel's files, the devices that this process could use, without torch or a driver."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from pathlib import Path

from acclimate.backends import presence

ROOT = Path("/")
_INTEL = "0x8086"

# The variables that limit the devices that a process sees
INTEL_VARIABLE = "ZE_AFFINITY_MASK"
NPU_VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"
SDAA_VARIABLE = "SDAA_VISIBLE_DEVICES"
HPU_VARIABLE = "HABANA_VISIBLE_MODULES"
MLU_VARIABLE = "MLU_VISIBLE_DEVICES"
NVIDIA_VARIABLE = "CUDA_VISIBLE_DEVICES"
_HIP_VARIABLE = "HIP_VISIBLE_DEVICES"
_ROCR_VARIABLE = "ROCR_VISIBLE_DEVICES"


def device_files(pattern: str, variable: str) -> Callable[[], int]:
    """Returns a counter of device files in ``/dev``, limited by a visible-devices variable."""
    return lambda: _visible(len(_files(pattern)), variable)


def intel_gpus() -> int:
    """Counts render nodes of Intel GPUs; other vendors' GPUs have render nodes as well.

    A GPU with several tiles counts once, although its runtime may present each tile as a device.
    """
    files = [Path(name).name for name in _files("/dev/dri/renderD*")]
    vendors = [_read(f"/sys/class/drm/{name}/device/vendor") for name in files]
    return _visible(vendors.count(_INTEL), INTEL_VARIABLE)


def cuda_gpus() -> int:
    """Counts NVIDIA GPUs, or AMD GPUs if the installed torch is built for ROCm."""
    if "hip" in presence.torch_build():
        # ROCm's lower layer hides devices first; HIP numbers the rest from 0.
        return _visible(_visible(_amd_gpus(), _ROCR_VARIABLE), _HIP_VARIABLE, NVIDIA_VARIABLE)
    gpus = len(_files("/dev/nvidia[0-9]*"))
    # Jetson's integrated GPU; WSL's single device file for all GPUs of Windows.
    return _visible(gpus or len(_files("/dev/nvhost-gpu") or _files("/dev/dxg")), NVIDIA_VARIABLE)


def cuda_variable() -> str:
    """Returns the variable that limits CUDA devices: NVIDIA's, on ROCm HIP's.

    HIP reads NVIDIA's if its own is not set, for programs ported from CUDA.
    """
    return _HIP_VARIABLE if "hip" in presence.torch_build() else NVIDIA_VARIABLE


def _amd_gpus() -> int:
    """Counts the compute driver's nodes with SIMD units and a device file; CPUs are nodes as well."""
    if not _files("/dev/kfd"):
        return 0
    count = 0
    for node in _files("/sys/class/kfd/kfd/topology/nodes/*/properties"):
        lines = (line.split() for line in _read_file(node).splitlines())
        properties = {fields[0]: fields[1] for fields in lines if len(fields) == 2}
        minor = properties.get("drm_render_minor", "0")
        # A container has device files only for its own GPUs, but sees the properties of all GPUs of the host.
        present = minor == "0" or _files(f"/dev/dri/renderD{minor}")
        count += bool(properties.get("simd_count", "0") != "0" and present)
    return count


def apple_gpus() -> int:
    """Returns 1 on Apple silicon, else 0."""
    return int(presence.on_apple_silicon())


def memory_nodes() -> int:
    """Counts memory nodes with a core that this process may use, which are the CPU accelerator's devices."""
    from acclimate.host.topology import usable_node_count

    return usable_node_count()


def visible_entries(text: str) -> list[str]:
    """Returns the entries of a visible-devices variable that count.

    Vendors read the list up to the first entry that cannot be a device: "-1" hides it and all that follow.
    """
    entries = (entry.strip() for entry in text.split(","))
    return list(takewhile(lambda entry: entry and entry[0] != "-", entries))


def first_set(variables: Iterable[str], environ: Mapping[str, str]) -> str | None:
    """Returns the variable that a runtime reads of several: the first that is set; ``None`` if none is."""
    return next((variable for variable in variables if variable in environ), None)


def _visible(present: int, *variables: str) -> int:
    """Returns how many of the present devices the first of these variables that is set makes visible."""
    variable = first_set(variables, os.environ)
    return present if variable is None else min(present, len(visible_entries(os.environ[variable])))


def _files(pattern: str) -> list[str]:
    return glob.glob(_under_root(pattern))


def _read(name: str) -> str:
    return _read_file(_under_root(name))


def _under_root(name: str) -> str:
    return f"{str(ROOT).rstrip('/')}{name}"


def _read_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
