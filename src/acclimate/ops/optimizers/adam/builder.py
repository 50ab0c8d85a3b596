"""Builders of the Adam ops."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.build.recipe import Source

# Contraction to fused multiply-add would give each instruction set its own last bit; -fno-math-errno lets
# a square root be one instruction; hidden symbols keep two libraries in one process apart.
HOST_FLAGS = ("-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden")
# The same for CUDA, where products and sums are contracted unless told.
CUDA_FLAGS = ("-fmad=false",)


class CPUAdamBuilder(OpBuilder):
    """Adam on the host; ``load()`` gives DeepSpeed's ``create_adam``, ``adam_update``, ``destroy_adam``, …"""

    name: ClassVar[str] = "cpu_adam"

    def sources(self) -> list[str | Source]:
        """The host's kernels, all instruction sets in one file."""
        return ["csrc/adam.cpp"]

    def cxx_args(self) -> list[str]:
        """What keeps every instruction set to the same bits."""
        return list(HOST_FLAGS)

    def define(self) -> None:
        """Defines ``acclimate::adam_``."""
        from acclimate.ops.optimizers.adam import schema

        schema.define()

    def module(self) -> ModuleType:
        """DeepSpeed's functions of its op of this name."""
        from acclimate.ops.optimizers.adam import cpu_module

        return cpu_module


class FusedAdamCPUBuilder(CPUAdamBuilder):
    """The same library as :class:`CPUAdamBuilder`'s; ``load()`` gives DeepSpeed's ``multi_tensor_adam``."""

    def module(self) -> ModuleType:
        """DeepSpeed's functions of its op of this name."""
        from acclimate.ops.optimizers.adam import fused_module

        return fused_module


class FusedAdamBuilder(OpBuilder):
    """Adam on a CUDA device; ``load()`` gives DeepSpeed's ``multi_tensor_adam``."""

    name: ClassVar[str] = "fused_adam"

    def sources(self) -> list[str | Source]:
        """One kernel, launched once for a whole parameter group."""
        return [Source("csrc/adam.cu", flags=CUDA_FLAGS)]

    def define(self) -> None:
        """Defines ``acclimate::adam_``."""
        from acclimate.ops.optimizers.adam import schema

        schema.define()

    def module(self) -> ModuleType:
        """DeepSpeed's functions of its op of this name."""
        from acclimate.ops.optimizers.adam import fused_module

        return fused_module


class TorchFusedAdamBuilder(FusedAdamBuilder):
    """Adam on any other device: torch's own fused kernel where it has one, else plain torch."""

    def sources(self) -> list[str | Source]:
        """None: nothing to build."""
        return []
