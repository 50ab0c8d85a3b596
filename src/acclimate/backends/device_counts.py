"""How many devices this process could use, told by the kernel's files: without torch and without a driver."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

from acclimate.backends.presence import on_apple_silicon, torch_build

ROOT = Path("/")
_INTEL = "0x8086"


def device_files(pattern: str, variable: str) -> Callable[[], int]:
    """Counts devices by their files under ``/dev``, within what a visible-devices variable allows."""
    return lambda: _visible(len(_files(pattern)), variable)


def intel_gpus() -> int:
    """Render nodes of Intel's; other vendors' GPUs have such files too.

    A GPU of several tiles counts once, although its runtime may present each tile as a device.
    """
    files = [Path(name).name for name in _files("/dev/dri/renderD*")]
    vendors = [_read(f"/sys/class/drm/{name}/device/vendor") for name in files]
    return _visible(vendors.count(_INTEL), "ZE_AFFINITY_MASK")


def cuda_gpus() -> int:
    """NVIDIA's GPUs; AMD's where the installed torch is built for ROCm."""
    if "hip" in torch_build():
        # HIP reads NVIDIA's variable too, for programs that were ported, where its own is not set.
        own = "HIP_VISIBLE_DEVICES"
        return _visible(_amd_gpus(), own if own in os.environ else "CUDA_VISIBLE_DEVICES")
    gpus = len(_files("/dev/nvidia[0-9]*"))
    # Jetson's integrated GPU, and the single door to all GPUs of the Windows around WSL.
    return _visible(gpus or len(_files("/dev/nvhost-gpu") or _files("/dev/dxg")), "CUDA_VISIBLE_DEVICES")


def _amd_gpus() -> int:
    """Nodes of the compute driver with processing units whose device file is here; a CPU is a node too."""
    if not _files("/dev/kfd"):
        return 0
    count = 0
    for node in _files("/sys/class/kfd/kfd/topology/nodes/*/properties"):
        lines = (line.split() for line in _read_file(node).splitlines())
        properties = {fields[0]: fields[1] for fields in lines if len(fields) == 2}
        minor = properties.get("drm_render_minor", "0")
        # A container is given some of the host's GPUs, and sees the properties of all.
        present = minor == "0" or _files(f"/dev/dri/renderD{minor}")
        count += bool(properties.get("simd_count", "0") != "0" and present)
    return count


def apple_gpus() -> int:
    """One on Apple silicon."""
    return int(on_apple_silicon())


def memory_nodes() -> int:
    """Memory nodes with a core this process may use: the CPU accelerator's devices."""
    from acclimate.topology import usable_node_count

    return usable_node_count()


def _visible(present: int, variable: str) -> int:
    visible = os.environ.get(variable)
    if visible is None:
        return present
    entries = (entry.strip() for entry in visible.split(","))
    # Vendors read the list up to the first entry that cannot be a device: "-1" hides all of them.
    return min(present, sum(1 for _ in takewhile(lambda entry: entry and entry[0] != "-", entries)))


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
