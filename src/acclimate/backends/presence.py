"""What is installed, told without importing it."""

from __future__ import annotations

import ctypes
import glob
import os
import re
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

_BUILD = re.compile(r"""^(\w+)\b[^=\n]*=\s*['"](.+)['"]""", re.MULTILINE)
# Servers and PCs; integrated GPUs (Jetson); the Windows around WSL.
_NVIDIA_DEVICE_FILES = ("/dev/nvidia*", "/dev/nvhost-*", "/dev/nvgpu*", "/dev/dxg")


def is_installed(package: str) -> bool:
    """Whether a top-level package could be imported; a folder that only has its name does not count."""
    return not is_bare_folder(locate(package))


def locate(package: str) -> ModuleSpec | None:
    """Where Python would import a top-level package from; ``None`` where there is none."""
    try:
        return find_spec(package)
    except Exception:  # noqa: BLE001 - a stand-in in sys.modules has no spec, or an import hook fails
        return None


def is_bare_folder(spec: ModuleSpec | None) -> bool:
    """Whether there is nothing to import: no package, or a "namespace package".

    Python makes one of any folder on ``sys.path``, such as a clone of the package's repository in the
    current folder.
    """
    return spec is None or (spec.origin is None and spec.submodule_search_locations is not None)


def has_package(package: str) -> Callable[[], bool]:
    """Asks whether a package is installed; a dotted one's parents may be shared by several packages."""

    def ask() -> bool:
        top, *rest = package.split(".")
        spec = locate(top)
        if not rest or spec is None:
            return not is_bare_folder(spec)
        folders = spec.submodule_search_locations or ()
        return any(Path(folder, *rest).with_suffix(end).exists() for folder in folders for end in ("", ".py"))

    return ask


def torch_built_for(*platforms: str) -> Callable[[], bool]:
    """Asks whether the installed torch was built for one of these: a name in its ``version`` module."""
    return lambda: not torch_build().keys().isdisjoint(platforms)


def torch_build() -> dict[str, str]:
    """What the installed torch was built for, with the release of each; empty without torch."""
    spec = locate("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        source = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return {}
    return {name: release for name, release in _BUILD.findall(source) if not name.startswith("_")}


def has_nvidia_driver() -> bool:
    """Whether CUDA's runtime would find a driver, told without starting it.

    A driver opens files under ``/dev``; one that reaches GPUs over a network has the library alone.
    """
    if not sys.platform.startswith("linux") or any(map(glob.glob, _NVIDIA_DEVICE_FILES)):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")  # loading it starts nothing: that is what cuInit() is for
    except OSError:
        return False
    return True


def has_ipex_for_gpus() -> bool:
    """Whether Intel Extension for PyTorch is installed, in its build for GPUs."""
    try:
        return "cpu" not in version("intel_extension_for_pytorch")
    except PackageNotFoundError:
        return False


def on_apple_silicon() -> bool:
    """Whether this is a Mac with a GPU that torch uses."""
    return sys.platform == "darwin" and os.uname().machine == "arm64"
