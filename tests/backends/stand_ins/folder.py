"""A folder for ``PYTHONPATH`` from which every process of a run has a stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from stand_ins import install, log
from stand_ins.ways import Way

HERE = Path(__file__).parent
# torch must find the device when it is first asked, which for CUDA is during its own import.
_PRELOAD = """
import ctypes, importlib.util, os
torch = os.path.join(importlib.util.find_spec("torch").submodule_search_locations[0], "lib")
for name in ("libc10.so", "libtorch_cpu.so"):
    ctypes.CDLL(os.path.join(torch, name), mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL({library!r})
"""
_METADATA = "Metadata-Version: 2.1\nName: stand-in\nVersion: 1.0\n"
_ENTRY_POINTS = "[torch.backends]\nstand_in = stand_ins.install:install\n"
_COMPILER = "[torch_dynamo_backends]\n{name} = stand_ins.built:run_as_it_is\n"
_BUILD = """
import sys
from acclimate.backends.cpu import CPUAccelerator
from acclimate_sim.library import DeviceLibraryBuilder, built_library
print(built_library(DeviceLibraryBuilder.for_device_type(sys.argv[1], CPUAccelerator())))
"""


def make_environment(called: str, way: Way, folder: Path) -> dict[str, str]:
    """Fills an empty folder; the variables with which a process has the stand-in, and writes the log.

    Args:
        called: the way's key.
        way: to make.
        folder: to fill; the log is in it too, see :func:`log_file`.
    """
    for module, source in way.packages.items():
        package = folder.joinpath(*module.split("."))
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(source)
    library = build(way.device_type)  # now, as torch finds no accelerator that is built during its own import
    if way.device_type in ("cuda", "mps", "xpu"):  # torch's own; the others are loaded by their packages
        (folder / "sitecustomize.py").write_text(_PRELOAD.format(library=library))
    metadata = folder / "stand_in-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(_METADATA)
    compiler = _COMPILER.format(name=way.compiler) if way.compiler else ""
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS + compiler)
    toolkit = {}
    if way.toolkit is not None:
        variable, file, text = way.toolkit
        toolkit[variable] = str(folder / "toolkit")
        (folder / "toolkit" / file).parent.mkdir(parents=True)
        (folder / "toolkit" / file).write_text(text)
    return {
        **toolkit,
        "ACCLIMATE_ACCELERATOR": way.accelerator,
        "ACCLIMATE_SIM": way.profile,
        "PYTHONPATH": os.pathsep.join([str(folder), str(HERE.parent)]),
        install.VARIABLE: called,
        log.VARIABLE: str(log_file(folder)),
    }


def log_file(folder: Path) -> Path:
    """Where the processes of a run write what happened."""
    return folder / "log"


def build(device_type: str) -> str:
    """The library of the emulated device under a name, built in a process of its own; its path."""
    told = subprocess.run(
        [sys.executable, "-c", _BUILD, device_type], capture_output=True, text=True, check=False
    )
    if told.returncode != 0:
        raise RuntimeError(f"the emulated device cannot be built as {device_type}:\n{told.stderr}")
    return told.stdout.strip()
