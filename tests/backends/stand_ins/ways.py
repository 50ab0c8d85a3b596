"""The ways to a backend that have a stand-in; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Way:
    """One way to a backend: a vendor's package, or torch itself."""

    accelerator: str
    """What ``ACCLIMATE_ACCELERATOR`` says."""
    backend: str
    """The class that runs, as ``"module:Class"``."""
    device_type: str
    surface: str
    """The recorded surface that the module has, by its file's name."""
    visible_devices: str = ""
    """The variable by which the vendor's runtime limits the devices of a process; none where empty."""
    communication: str = ""
    """The name in ``torch.distributed`` under which gloo moves the device's bytes; none where empty."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Modules besides ``torch.<device type>`` that can be imported, and their source."""
    profile: str = ""
    """Of the emulated device."""
    compiler: str = ""
    """What the vendor adds to the backends of ``torch.compile``; nothing where empty."""
    toolkit: tuple[str, str, str] | None = None
    """A variable with the folder of the vendor's software, a file there, and its text."""
    keeps_statistics: bool = True
    """Whether its allocator is one that ``torch.accelerator`` can ask."""


_MODULE = "from stand_ins.install import module as __getattr__\n"
_PACKAGE = "import torch\n"
_IPEX = {
    "intel_extension_for_pytorch": _PACKAGE + "from intel_extension_for_pytorch import _C\n",
    "intel_extension_for_pytorch._C": "def _has_xpu(): return True\n",
}

_CANN = (
    "ASCEND_HOME_PATH",
    "x86_64-linux/ascend_toolkit_install.info",
    "package_name=cann\nversion=8.2.RC1\n",
)

WAYS = {
    "cuda": Way(
        accelerator="cuda",
        backend="acclimate.backends.cuda:CUDAAccelerator",
        device_type="cuda",
        surface="torch.cuda-2.13.0",
        visible_devices="CUDA_VISIBLE_DEVICES",
        communication="nccl",
    ),
    "xpu": Way(
        accelerator="xpu",
        backend="acclimate.backends.xpu:XPUAccelerator",
        device_type="xpu",
        surface="torch.xpu-2.13.0",
        visible_devices="ZE_AFFINITY_MASK",
        communication="xccl",
    ),
    "xpu with IPEX": Way(
        accelerator="xpu",
        backend="acclimate.backends.xpu:XPUAccelerator",
        device_type="xpu",
        surface="intel_extension_for_pytorch-2.8.0",
        visible_devices="ZE_AFFINITY_MASK",
        communication="ccl",
        packages=_IPEX,
    ),
    "xpu.external": Way(
        accelerator="xpu.external",
        backend="acclimate.backends.xpu:ExternalXPUAccelerator",
        device_type="xpu",
        surface="intel_extension_for_pytorch-2.8.0",
        visible_devices="ZE_AFFINITY_MASK",
        communication="ccl",
        packages={
            **_IPEX,
            "intel_extension_for_deepspeed": _PACKAGE + "import intel_extension_for_pytorch\n",
        },
    ),
    "npu": Way(
        accelerator="npu",
        backend="acclimate.backends.npu:NPUAccelerator",
        device_type="npu",
        surface="torch_npu-2.14.0",
        visible_devices="ASCEND_RT_VISIBLE_DEVICES",
        communication="hccl",
        packages={"torch_npu": _PACKAGE},
        toolkit=_CANN,
    ),
    "mps": Way(
        accelerator="mps",
        backend="acclimate.backends.mps:MPSAccelerator",
        device_type="mps",
        surface="torch.mps-2.13.0",
        profile="mps-like",
    ),
    "mps of torch 2.10": Way(
        accelerator="mps",
        backend="acclimate.backends.mps:MPSAccelerator",
        device_type="mps",
        surface="torch.mps-2.10.0",
        profile="mps-like",
        keeps_statistics=False,
    ),
    "hpu": Way(
        accelerator="hpu",
        backend="acclimate.backends.hpu:HPUAccelerator",
        device_type="hpu",
        surface="habana_frameworks-2025.01.17",
        visible_devices="HABANA_VISIBLE_MODULES",
        communication="hccl",
        packages={"habana_frameworks.torch": "", "habana_frameworks.torch.hpu": _MODULE},
        profile="hpu-like,devices=1",
        compiler="hpu_backend",
        keeps_statistics=False,
    ),
    "mlu": Way(
        accelerator="mlu",
        backend="acclimate.backends.mlu:MLUAccelerator",
        device_type="mlu",
        surface="torch_mlu-2024.09.18",
        visible_devices="MLU_VISIBLE_DEVICES",
        communication="cncl",
        packages={"torch_mlu": _PACKAGE},
    ),
    "sdaa": Way(
        accelerator="sdaa",
        backend="acclimate.backends.sdaa:SDAAAccelerator",
        device_type="sdaa",
        surface="torch_sdaa-2026.08.22",
        visible_devices="SDAA_VISIBLE_DEVICES",
        communication="tccl",
        packages={"torch_sdaa": _PACKAGE},
    ),
}
"""By what they are called in a report."""
