"""The accelerators that come with acclimate: one record each here, one file each beside."""

from __future__ import annotations

from acclimate.backends import probes
from acclimate.backends.record import Backend

__all__ = ["BUILTIN", "Backend"]

GENERIC_RANK = 100
"""Where a device that torch knows and no record names is tried: after cuda, before cpu."""

SPECIFIED = ("cuda", "cpu", "xpu", "xpu.external", "npu", "mps", "hpu", "mlu", "sdaa")
"""The specification's names, in the order of its message, which users know."""

_XPU_FILES = probes.device_files("/dev/dri/renderD*", "ZE_AFFINITY_MASK")

BUILTIN: tuple[Backend, ...] = (
    Backend(
        name="xpu.external",
        target="acclimate.backends.xpu:ExternalXPUAccelerator",
        probe=probes.xpu_external,
        rank=10,
        device_count=_XPU_FILES,
        device_type="xpu",
        remedy="Install intel_extension_for_deepspeed",
    ),
    Backend(
        name="xpu",
        target="acclimate.backends.xpu:XPUAccelerator",
        probe=probes.xpu_ipex,
        rank=20,
        device_count=_XPU_FILES,
        remedy="Install intel_extension_for_pytorch with XPU support",
    ),
    Backend(
        name="xpu",
        target="acclimate.backends.xpu:XPUAccelerator",
        probe=probes.xpu_native,
        rank=30,
        device_count=_XPU_FILES,
        yields_to=("cuda",),
        remedy="Install a build of torch for Intel GPUs",
    ),
    Backend(
        name="npu",
        target="acclimate.backends.npu:NPUAccelerator",
        probe=probes.vendor_package("NPU_Accelerator", "torch_npu", "npu"),
        rank=40,
        device_count=probes.device_files("/dev/davinci[0-9]*", "ASCEND_RT_VISIBLE_DEVICES"),
        remedy="Install it (pip install torch-npu) with the CANN toolkit",
    ),
    Backend(
        name="sdaa",
        target="acclimate.backends.sdaa:SDAAAccelerator",
        probe=probes.vendor_package("SDAA_Accelerator", "torch_sdaa", "sdaa"),
        rank=50,
        device_count=probes.device_files("/dev/tcaicard[0-9]*", "SDAA_VISIBLE_DEVICES"),
        remedy="Install torch_sdaa with Tecorigin's drivers",
    ),
    Backend(
        name="mps",
        target="acclimate.backends.mps:MPSAccelerator",
        probe=probes.mps,
        rank=60,
        device_count=probes.apple_gpus,
        remedy="Use a Mac with Apple silicon and a build of torch for it",
    ),
    Backend(
        name="hpu",
        target="acclimate.backends.hpu:HPUAccelerator",
        probe=probes.vendor_package("HPU_Accelerator", "habana_frameworks.torch.hpu", "hpu"),
        rank=70,
        device_count=probes.device_files("/dev/accel/accel[0-9]*", "HABANA_VISIBLE_MODULES"),
        remedy="Install the Habana SynapseAI software stack",
    ),
    Backend(
        name="mlu",
        target="acclimate.backends.mlu:MLUAccelerator",
        probe=probes.vendor_package("MLU_Accelerator", "torch_mlu", "mlu"),
        rank=80,
        device_count=probes.device_files("/dev/cambricon_dev[0-9]*", "MLU_VISIBLE_DEVICES"),
        remedy="Install torch_mlu with the Cambricon Neuware SDK",
    ),
    Backend(
        name="cuda",
        target="acclimate.backends.cuda:CUDAAccelerator",
        probe=probes.cuda,
        rank=90,
        device_count=probes.device_files("/dev/nvidia[0-9]*", "CUDA_VISIBLE_DEVICES"),
        remedy="Install a build of torch for CUDA, and the GPU's driver",
    ),
    Backend(
        name="cpu",
        target="acclimate.backends.cpu:CPUAccelerator",
        probe=probes.cpu,
        rank=1000,
        device_count=probes.memory_nodes,
        is_fallback=True,
    ),
)
