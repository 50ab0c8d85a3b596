"""Probes: each returns why an accelerator cannot be used here, or ``None``.

A vendor's package may fail in any way at import if its hardware is absent, so a probe first checks, without
importing it, whether it is installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pkgutil import resolve_name
from types import ModuleType

from acclimate.backends.device_counts import NVIDIA_VARIABLE, cuda_variable, first_set
from acclimate.backends.presence import has_nvidia_driver, is_bare_folder, locate, torch_build
from acclimate.errors import excerpt
from acclimate.imports import VendorCodeError, import_vendor_module

Probe = Callable[[], "str | None"]


def import_package(label: str, module: str) -> ModuleType | str:
    """Imports a vendor's module, or returns why that fails, in the words of DeepSpeed's specification."""
    requirement = f"{label} requires {module}"
    absent = f"{requirement}, which is not installed on this system."
    if locate(module.partition(".")[0]) is None:
        return absent
    try:
        package = import_vendor_module(module)
    except VendorCodeError as error:
        return f"{requirement}, which is installed but fails to import: {error}"
    # Only the module itself must be more than a folder: several packages share habana_frameworks.
    return absent if is_bare_folder(package.__spec__) else package


def vendor_package(label: str, module: str, device_type: str) -> Probe:
    """Returns a probe for a device that a vendor's package adds to torch as ``torch.<device_type>``."""

    def probe() -> str | None:
        package = import_package(label, module)
        if isinstance(package, str):
            return package
        import torch

        places = (getattr(torch, device_type, None), getattr(package, device_type, None), package)
        runtime = next((place for place in places if hasattr(place, "device_count")), None)
        if runtime is None:
            return f"{module} imports, but adds no torch.{device_type} with a device_count()."
        return None if runtime.device_count() > 0 else f"{module} imports, but finds no device."

    return probe


def xpu_external() -> str | None:
    """Probes for Intel GPUs through Intel Extension for DeepSpeed."""
    if locate("intel_extension_for_deepspeed") is not None:
        # It imports DeepSpeed's accelerator layer, which acclimate replaces if DeepSpeed is not installed.
        resolve_name("acclimate.compat.deepspeed.names:offer")()
    package = import_package("XPU_Accelerator", "intel_extension_for_deepspeed")
    if isinstance(package, str):
        return package
    return xpu_native()


def xpu_ipex() -> str | None:
    """Probes for Intel GPUs through the GPU build of Intel Extension for PyTorch."""
    package = import_package("XPU_Accelerator", "intel_extension_for_pytorch")
    if isinstance(package, str):
        return package
    if not package._C._has_xpu():
        return "intel_extension_for_pytorch is installed, but this build of it is for CPUs only."
    return xpu_native()


def xpu_native() -> str | None:
    """Probes for Intel GPUs through torch itself."""
    import torch

    if torch.xpu.device_count() > 0:
        return None
    return f"torch {torch.__version__} finds no Intel GPU."


def mps() -> str | None:
    """Probes for Apple GPUs."""
    import torch

    try:
        # As in DeepSpeed's specification: works on builds of torch without torch.mps.is_available().
        torch.mps.current_allocated_memory()
    except (AttributeError, RuntimeError):
        return "MPS_Accelerator requires torch.mps, which is not available on this system."
    return None


def cuda() -> str | None:
    """Probes for NVIDIA and AMD GPUs."""
    import torch

    if not torch.backends.cuda.is_built():
        return f"this build of torch ({torch.__version__}) has no CUDA support."
    # Not torch.cuda.is_available(): it initialises the driver, after which forked children cannot use CUDA.
    # device_count() asks the management library first, and initialises the driver only if that fails.
    if "cuda" in torch_build() and not has_nvidia_driver():
        return f"torch {torch.__version__} finds no NVIDIA driver."
    if torch.cuda.device_count() == 0:
        variable = first_set((cuda_variable(), NVIDIA_VARIABLE), os.environ)
        hidden = "" if variable is None else f' ({variable} is "{excerpt(os.environ[variable])}")'
        return f"torch {torch.__version__} finds no CUDA device{hidden}."
    return None


def cpu() -> str | None:
    """Returns ``None``: the CPU can always be used."""
    return None
