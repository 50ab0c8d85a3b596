"""Fake vendors' packages: what each adds to torch where its hardware is present, and how each fails.

Only the border is faked: the vendor's module at import, and what torch answers about devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from textwrap import dedent

import pytest


@dataclass(frozen=True)
class FakeVendor:
    """One way to an accelerator."""

    way: str
    """Its name here; the two ways to ``xpu`` differ in it."""
    name: str
    """What ``DS_ACCELERATOR`` says."""
    module: str = ""
    """The vendor's module; empty where torch needs none."""
    requirement: str = ""
    """The specification's words when the module is missing."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Source of the module and those beside it; ``DEVICES`` in it stands for a number."""
    prelude: str = ""
    """What torch itself answers on such a machine; ``DEVICES`` stands for a number."""


def _device_module(device_type: str) -> str:
    return dedent(f"""
        import types, torch
        torch.{device_type} = types.ModuleType("torch.{device_type}")
        torch.{device_type}.device_count = lambda: DEVICES
    """)


_TORCH_XPU = "import torch\ntorch.xpu.device_count = lambda: DEVICES\n"
_CUDA = dedent("""
    import ctypes, torch
    class Linker(ctypes.CDLL):
        def __init__(self, name, *args, **kwargs):
            if name != "libcuda.so.1":
                super().__init__(name, *args, **kwargs)
    ctypes.CDLL = Linker
    torch.backends.cuda.is_built = lambda: True
    torch.cuda.device_count = lambda: DEVICES
""")
_MPS = "import torch\ntorch.mps.current_allocated_memory = lambda: 0\n"
_GENERIC = dedent("""
    import torch
    torch.utils.backend_registration._setup_privateuseone_for_python_backend("unheard_of")
""")

IN_ORDER = (
    FakeVendor(
        "xpu.external",
        "xpu.external",
        "intel_extension_for_deepspeed",
        "XPU_Accelerator requires intel_extension_for_deepspeed",
        {"intel_extension_for_deepspeed": _TORCH_XPU},
    ),
    FakeVendor(
        "xpu_ipex",
        "xpu",
        "intel_extension_for_pytorch",
        "XPU_Accelerator requires intel_extension_for_pytorch",
        {
            "intel_extension_for_pytorch": _TORCH_XPU + "from intel_extension_for_pytorch import _C\n",
            "intel_extension_for_pytorch._C": "def _has_xpu(): return True\n",
        },
    ),
    FakeVendor("xpu_native", "xpu", prelude=_TORCH_XPU),
    FakeVendor(
        "npu", "npu", "torch_npu", "NPU_Accelerator requires torch_npu", {"torch_npu": _device_module("npu")}
    ),
    FakeVendor(
        "sdaa",
        "sdaa",
        "torch_sdaa",
        "SDAA_Accelerator requires torch_sdaa",
        {"torch_sdaa": _device_module("sdaa")},
    ),
    FakeVendor("mps", "mps", requirement="MPS_Accelerator requires torch.mps", prelude=_MPS),
    FakeVendor(
        "hpu",
        "hpu",
        "habana_frameworks.torch.hpu",
        "HPU_Accelerator requires habana_frameworks.torch.hpu",
        {
            "habana_frameworks.torch": "",
            "habana_frameworks.torch.hpu": "def device_count(): return DEVICES\n",
        },
    ),
    FakeVendor(
        "mlu", "mlu", "torch_mlu", "MLU_Accelerator requires torch_mlu", {"torch_mlu": _device_module("mlu")}
    ),
    FakeVendor("cuda", "cuda", prelude=_CUDA),
    FakeVendor("generic", "unheard_of", prelude=_GENERIC),
    FakeVendor("cpu", "cpu"),
)
"""The specification's order, with the device that only torch knows after cuda."""
BY_WAY = {vendor.way: vendor for vendor in IN_ORDER}
WITH_PACKAGE = tuple(vendor for vendor in IN_ORDER if vendor.module)

BREAKAGES = {
    # As torch_npu without CANN, as IPEX on another torch, and whatever else a vendor's code may do.
    "ImportError": "raise ImportError('libhccl.so: cannot open shared object file')",
    "AttributeError": "import os; os.exit(127)",
    "RuntimeError": "raise RuntimeError('driver too old')",
    "SystemExit": "raise SystemExit(127)",
    "OSError": "import ctypes; ctypes.CDLL('libno_such_library.so')",
    "SyntaxError": "def broken(:",
    "Unspeakable": dedent("""
        class Unspeakable(Exception):
            def __str__(self): raise ValueError("it cannot even say what it is")
        raise Unspeakable
    """),
}
"""The name of the exception that importing a module ends in, and the module's source."""


class FakeMachine:
    """A folder of packages for ``sys.path``, and what torch answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = [folder]
        self.prelude = ""
        self._numbers: Iterator[int] = count()

    def write(self, module: str, source: str) -> None:
        """Makes a module that can be imported, as a package; its parents are bare folders unless written."""
        package = self.folder.joinpath(*module.split("."))
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(source)

    def add(self, vendor: FakeVendor, devices: int = 1) -> None:
        """Makes a vendor's accelerator present and working."""
        for module, source in vendor.modules.items():
            self.write(module, source.replace("DEVICES", str(devices)))
        self.prelude += vendor.prelude.replace("DEVICES", str(devices))

    def add_broken(self, vendor: FakeVendor, source: str) -> None:
        """Makes a vendor's package present, with ``source`` in the place of its module."""
        self.add(vendor)
        self.write(vendor.module, source)

    def add_entry_points(self, entries: Iterable[tuple[str, str]]) -> None:
        """Installs a distribution that registers ``(name, "module:attribute")`` as backends."""
        name = f"distribution{next(self._numbers)}"
        metadata = self.folder / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = "".join(f"{entry} = {target}\n" for entry, target in entries)
        (metadata / "entry_points.txt").write_text(f"[acclimate.backends]\n{lines}")


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    """A machine without any vendor's package yet."""
    return FakeMachine(tmp_path)
