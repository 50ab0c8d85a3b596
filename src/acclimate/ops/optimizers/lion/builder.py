"""Builders of the Lion ops."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.build.recipe import Source
from acclimate.ops.optimizers.adam.builder import CUDA_FLAGS, HOST_FLAGS


class CPULionBuilder(OpBuilder):
    """Lion on the host; ``load()`` gives DeepSpeed's ``create_lion``, ``lion_update``, …"""

    name: ClassVar[str] = "cpu_lion"

    def sources(self) -> list[str | Source]:
        """The host's kernels, all instruction sets in one file."""
        return ["csrc/lion.cpp"]

    def cxx_args(self) -> list[str]:
        """What keeps every instruction set to the same bits."""
        return list(HOST_FLAGS)

    def define(self) -> None:
        """Defines ``acclimate::lion_``."""
        from acclimate.ops.optimizers.lion import schema

        schema.define()

    def module(self) -> ModuleType:
        """DeepSpeed's functions of its op of this name."""
        from acclimate.ops.optimizers.lion import cpu_module

        return cpu_module


class FusedLionCPUBuilder(CPULionBuilder):
    """The same library as :class:`CPULionBuilder`'s; ``load()`` gives DeepSpeed's ``multi_tensor_lion``."""

    def module(self) -> ModuleType:
        """DeepSpeed's functions of its op of this name."""
        from acclimate.ops.optimizers.lion import fused_module

        return fused_module


class FusedLionBuilder(OpBuilder):
    """Lion on a CUDA device; ``load()`` gives DeepSpeed's ``multi_tensor_lion``."""

    name: ClassVar[str] = "fused_lion"

    def sources(self) -> list[str | Source]:
        """One kernel, launched once for a whole parameter group."""
        return [Source("csrc/lion.cu", flags=CUDA_FLAGS)]

    def define(self) -> None:
        """Defines ``acclimate::lion_``."""
        from acclimate.ops.optimizers.lion import schema

        schema.define()

    def module(self) -> ModuleType:
        """DeepSpeed's functions of its op of this name."""
        from acclimate.ops.optimizers.lion import fused_module

        return fused_module
