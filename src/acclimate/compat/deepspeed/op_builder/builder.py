"""DeepSpeed's ``OpBuilder`` class, for builders that were written for DeepSpeed."""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import shutil
from collections.abc import Iterable
from ctypes.util import find_library
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from acclimate.cache import cache_root
from acclimate.errors import OpBuildError
from acclimate.ops.build import builder

TORCH_MAJOR, TORCH_MINOR = (int(part) for part in torch.__version__.split(".")[:2])

_logger = logging.getLogger("acclimate")
_native: dict[tuple[type[Any], str], ModuleType] = {}


class OpBuilder(builder.OpBuilder):
    """A builder with DeepSpeed's constructor and methods, and with acclimate's compiler, cache and lock.

    Sources and headers are looked for under :meth:`deepspeed_src_path`, then beside the subclass's module.
    The native code is a Python module (``PYBIND11_MODULE``).
    """

    stable_abi = False

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name  # type: ignore[misc] # the base class has it once for all objects
        self.jit_mode = False

    def absolute_name(self) -> str:
        """Returns the dotted name of the module, which is built into the cache under its last part."""
        return f"deepspeed.ops.{self.name}_op"

    def strip_empty_entries(self, args: Iterable[str]) -> list[str]:
        return [arg for arg in args if arg]

    def deepspeed_src_path(self, code_path: str) -> str:
        """Returns the path of a source in DeepSpeed's package, into which extensions copy their sources."""
        # Two folders deep, because extensions create symbolic links to "../..".
        return os.path.join(cache_root(), "deepspeed_sources", "deepspeed", "ops", code_path)

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """Builds and loads the op; subclasses call this in their own ``load``."""
        return super().load(verbose)

    @staticmethod
    def is_rocm_pytorch() -> bool:
        return torch.version.hip is not None

    def command_exists(self, cmd: str) -> bool:
        """Whether one of the commands, separated by ``|``, is installed; warns if none is."""
        found = any(shutil.which(part.strip()) for part in cmd.split("|"))
        if not found:
            self.warning(f"{self.name} needs the command {cmd}, which is not installed")
        return found

    def nvcc_args(self) -> list[str]:
        """Returns no flags for CUDA sources: the accelerator's compiler has them already."""
        return []

    def cpu_arch(self) -> str:
        """Returns the flag with which native code may use all instructions of this processor."""
        return "-march=native"

    def simd_width(self) -> str:
        """Returns the macro that gives DeepSpeed's sources the vector width of this processor."""
        widths = {"AVX512": "-D__AVX512__", "AVX2": "-D__AVX256__"}
        return widths.get(torch.backends.cpu.get_cpu_capability(), "-D__SCALAR__")

    def has_function(
        self,
        funcname: str,
        libraries: Iterable[str],
        library_dirs: Iterable[str] | None = None,
        verbose: bool = False,
    ) -> bool:
        """Whether one of the installed libraries has a function."""
        found = [find_library(name) for name in libraries]
        return any(hasattr(ctypes.CDLL(library), funcname) for library in found if library is not None)

    def warning(self, msg: str) -> None:
        _logger.warning("%s", msg)

    def extra_ldflags(self) -> list[str]:
        return []

    def libraries_args(self) -> list[str]:
        return []

    def link_args(self) -> list[str]:
        libraries = [f"-l{name}" for name in self.libraries_args()]
        # Split like a shell, as in torch's builds: an entry may be two arguments, or be quoted.
        return shlex.split(" ".join([*self.extra_ldflags(), *libraries]))

    def define(self) -> None:
        """Does nothing: the native module has its own functions."""

    def open_library(self, path: Path) -> None:
        _native[type(self), self.name] = self.import_library(path)

    def module(self) -> ModuleType:
        """Returns the native module.

        Raises:
            OpBuildError: the op could not be built and has no fallback.
        """
        module = _native.get((type(self), self.name))
        if module is None:
            raise OpBuildError(f'The op "{self.name}" has no plain torch fallback: {self.incompatibility()}.')
        return module

    def _found(self, path: str) -> Path:
        copied = Path(self.deepspeed_src_path(path))
        return copied if copied.exists() else super()._found(path)
