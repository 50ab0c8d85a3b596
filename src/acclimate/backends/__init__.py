"""The built-in accelerators: a record for each in this file, and a module for each beside it."""

from __future__ import annotations

from acclimate.backends import device_counts, presence, probes
from acclimate.backends.record import Backend

__all__ = ["BUILTIN", "Backend"]

GENERIC_RANK = 100
"""The rank of a device that torch knows but no record names: after cuda, before cpu."""

COMMON_WORDS = {
    "gpu": "cuda",
    **dict.fromkeys(("nvidia", "amd", "rocm", "hip"), "cuda"),  # torch's name for AMD's GPUs, too
    **dict.fromkeys(("intel", "oneapi", "sycl"), "xpu"),
    **dict.fromkeys(("ascend", "huawei", "cann"), "npu"),
    **dict.fromkeys(("apple", "metal"), "mps"),
    **dict.fromkeys(("gaudi", "habana"), "hpu"),
    "cambricon": "mlu",
    "tecorigin": "sdaa",
    "host": "cpu",
}
"""Words for hardware that name no accelerator, with the accelerator that each means."""

SPECIFIED = ("cuda", "cpu", "xpu", "xpu.external", "npu", "mps", "hpu", "mlu", "sdaa")
"""The names in DeepSpeed's specification, in the order of its error message."""

_INTEL_VARIABLES = ("CCL_", "FI_", "I_MPI_", "ONEAPI_", "SYCL_", "UR_", "ZE_")

BUILTIN: tuple[Backend, ...] = (
    Backend(
        name="xpu.external",
        target="acclimate.backends.xpu:ExternalXPUAccelerator",
        probe=probes.xpu_external,
        rank=10,
        device_count=device_counts.intel_gpus,
        device_type="xpu",
        remedy="Install intel_extension_for_deepspeed with intel_extension_for_pytorch",
        is_installed=presence.has_package("intel_extension_for_deepspeed"),
        visible_devices_variable=lambda: device_counts.INTEL_VARIABLE,
        exported_variable_prefixes=_INTEL_VARIABLES,
    ),
    Backend(
        name="xpu",
        target="acclimate.backends.xpu:XPUAccelerator",
        probe=probes.xpu_ipex,
        rank=20,
        device_count=device_counts.intel_gpus,
        remedy="Install intel_extension_for_pytorch with XPU support",
        is_installed=presence.has_ipex_for_gpus,
        visible_devices_variable=lambda: device_counts.INTEL_VARIABLE,
        exported_variable_prefixes=_INTEL_VARIABLES,
    ),
    Backend(
        name="xpu",
        target="acclimate.backends.xpu:XPUAccelerator",
        probe=probes.xpu_native,
        rank=30,
        device_count=device_counts.intel_gpus,
        yields_to=("cuda",),
        remedy="Install a build of torch for Intel GPUs",
        is_installed=presence.torch_built_for("xpu"),
        visible_devices_variable=lambda: device_counts.INTEL_VARIABLE,
        exported_variable_prefixes=_INTEL_VARIABLES,
    ),
    Backend(
        name="npu",
        target="acclimate.backends.npu:NPUAccelerator",
        probe=probes.vendor_package("NPU_Accelerator", "torch_npu", "npu"),
        rank=40,
        device_count=device_counts.device_files("/dev/davinci[0-9]*", device_counts.NPU_VARIABLE),
        remedy="Install it (pip install torch-npu) with the CANN toolkit",
        is_installed=presence.has_package("torch_npu"),
        visible_devices_variable=lambda: device_counts.NPU_VARIABLE,
        exported_variable_prefixes=("ASCEND", "HCCL"),
    ),
    Backend(
        name="sdaa",
        target="acclimate.backends.sdaa:SDAAAccelerator",
        probe=probes.vendor_package("SDAA_Accelerator", "torch_sdaa", "sdaa"),
        rank=50,
        device_count=device_counts.device_files("/dev/tcaicard[0-9]*", device_counts.SDAA_VARIABLE),
        remedy="Install torch_sdaa with Tecorigin's drivers",
        is_installed=presence.has_package("torch_sdaa"),
        visible_devices_variable=lambda: device_counts.SDAA_VARIABLE,
        exported_variable_prefixes=("TCCL",),
    ),
    Backend(
        name="mps",
        target="acclimate.backends.mps:MPSAccelerator",
        probe=probes.mps,
        rank=60,
        device_count=device_counts.apple_gpus,
        remedy="Use a Mac with Apple silicon and a build of torch for it",
        is_installed=presence.on_apple_silicon,
    ),
    Backend(
        name="hpu",
        target="acclimate.backends.hpu:HPUAccelerator",
        probe=probes.vendor_package("HPU_Accelerator", "habana_frameworks.torch.hpu", "hpu"),
        rank=70,
        device_count=device_counts.device_files("/dev/accel/accel[0-9]*", device_counts.HPU_VARIABLE),
        remedy="Install the Habana SynapseAI software stack",
        is_installed=presence.has_package("habana_frameworks.torch"),
        visible_devices_variable=lambda: device_counts.HPU_VARIABLE,
        exported_variable_prefixes=("HABANA", "HCCL", "PT_HPU"),
    ),
    Backend(
        name="mlu",
        target="acclimate.backends.mlu:MLUAccelerator",
        probe=probes.vendor_package("MLU_Accelerator", "torch_mlu", "mlu"),
        rank=80,
        device_count=device_counts.device_files("/dev/cambricon_dev[0-9]*", device_counts.MLU_VARIABLE),
        remedy="Install torch_mlu with the Cambricon Neuware SDK",
        is_installed=presence.has_package("torch_mlu"),
        visible_devices_variable=lambda: device_counts.MLU_VARIABLE,
        exported_variable_prefixes=("CNCL", "NEUWARE_HOME"),
    ),
    Backend(
        name="cuda",
        target="acclimate.backends.cuda:CUDAAccelerator",
        probe=probes.cuda,
        rank=90,
        device_count=device_counts.cuda_gpus,
        remedy="Install a build of torch for CUDA, and the GPU's driver",
        is_installed=presence.torch_built_for("cuda", "hip"),
        visible_devices_variable=device_counts.cuda_variable,
        visible_devices_fallbacks=(device_counts.NVIDIA_VARIABLE,),
        exported_variable_prefixes=("NCCL",),
    ),
    Backend(
        name="cpu",
        target="acclimate.backends.cpu:CPUAccelerator",
        probe=probes.cpu,
        rank=1000,
        device_count=device_counts.memory_nodes,
        is_fallback=True,
        exported_variable_prefixes=("CCL_", "FI_", "I_MPI_", "KMP_", "OMP_"),
    ),
)


def builtin(name: str) -> Backend:
    """Returns the first built-in record with this name."""
    return next(record for record in BUILTIN if record.name == name)
