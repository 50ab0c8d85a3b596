"""Finds out what is installed, without importing it."""

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
# Servers and PCs; integrated GPUs (Jetson); WSL.
_NVIDIA_DEVICE_FILES = ("/dev/nvidia*", "/dev/nvhost-*", "/dev/nvgpu*", "/dev/dxg")


def is_installed(package: str) -> bool:
    """Whether a top-level package is installed; a mere folder of this name does not count."""
    return not is_bare_folder(locate(package))


def locate(package: str) -> ModuleSpec | None:
    """Returns the spec with which Python would import a top-level package, or ``None``."""
    try:
        return find_spec(package)
    except Exception:  # noqa: BLE001 - a stand-in in sys.modules has no spec, or an import hook fails
        return None


def is_bare_folder(spec: ModuleSpec | None) -> bool:
    """Whether there is nothing to import: no package, or only a "namespace package".

    Python treats any folder on ``sys.path`` as one, such as a clone of the package's repository in the
    current folder.
    """
    return spec is None or (spec.origin is None and spec.submodule_search_locations is not None)


def has_package(package: str) -> Callable[[], bool]:
    """Returns a check whether a package is installed; several packages may share a dotted name's parents."""

    def ask() -> bool:
        top, *rest = package.split(".")
        spec = locate(top)
        if not rest or spec is None:
            return not is_bare_folder(spec)
        folders = spec.submodule_search_locations or ()
        return any(Path(folder, *rest).with_suffix(end).exists() for folder in folders for end in ("", ".py"))

    return ask


def torch_built_for(*platforms: str) -> Callable[[], bool]:
    """Returns a check whether torch was built for one of these: names in its ``version`` module."""
    return lambda: not torch_build().keys().isdisjoint(platforms)


def torch_build() -> dict[str, str]:
    """Returns the platforms that torch was built for, with their releases; empty without torch."""
    spec = locate("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        source = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return {}
    return {name: release for name, release in _BUILD.findall(source) if not name.startswith("_")}


def has_nvidia_driver() -> bool:
    """Whether CUDA's runtime would find a driver, without initialising it.

    A driver has files in ``/dev``; one that reaches GPUs over a network has only the library.
    """
    if not sys.platform.startswith("linux") or any(map(glob.glob, _NVIDIA_DEVICE_FILES)):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")  # loading it initialises nothing; cuInit() does
    except OSError:
        return False
    return True


def has_ipex_for_gpus() -> bool:
    """Whether the GPU build of Intel Extension for PyTorch is installed."""
    try:
        return "cpu" not in version("intel_extension_for_pytorch")
    except PackageNotFoundError:
        return False


def on_apple_silicon() -> bool:
    """Whether this is a Mac with a GPU that torch supports."""
    return sys.platform == "darwin" and os.uname().machine == "arm64"
