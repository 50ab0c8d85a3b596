"""DeepSpeed's ``OpBuilder``, for builders that were written for it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from acclimate.cache import cache_root
from acclimate.errors import OpBuildError
from acclimate.ops.build import builder

TORCH_MAJOR, TORCH_MINOR = (int(part) for part in torch.__version__.split(".")[:2])

_native: dict[tuple[type[Any], str], ModuleType] = {}


class OpBuilder(builder.OpBuilder):
    """A builder with DeepSpeed's constructor and methods, and with our compiler, cache and lock.

    Sources and headers are found where :meth:`deepspeed_src_path` says, or beside the module of the subclass.
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
        """Returns the arguments that are not empty."""
        return [arg for arg in args if arg]

    def deepspeed_src_path(self, code_path: str) -> str:
        """Returns the path of a source below DeepSpeed's package, where extensions copy their sources to."""
        # Two folders deep, since extensions make links to "../..".
        return os.path.join(cache_root(), "deepspeed_sources", "deepspeed", "ops", code_path)

    def extra_ldflags(self) -> list[str]:
        """Returns flags for the linker."""
        return []

    def libraries_args(self) -> list[str]:
        """Returns libraries to link with."""
        return []

    def link_args(self) -> list[str]:
        libraries = [f"-l{name}" for name in self.libraries_args()]
        return self.strip_empty_entries([*self.extra_ldflags(), *libraries])

    def define(self) -> None:
        """Nothing: the native module has its own functions."""

    def open_library(self, path: Path) -> None:
        _native[type(self), self.name] = self.import_library(path)

    def module(self) -> ModuleType:
        """Returns the native module.

        Raises:
            OpBuildError: there is none, since it could not be built and has no fallback.
        """
        module = _native.get((type(self), self.name))
        if module is None:
            raise OpBuildError(f'The op "{self.name}" has no plain torch fallback: {self.incompatibility()}.')
        return module

    def _found(self, path: str) -> Path:
        copied = Path(self.deepspeed_src_path(path))
        return copied if copied.exists() else super()._found(path)
