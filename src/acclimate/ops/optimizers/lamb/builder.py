"""Builder of the LAMB op."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.build.recipe import Source
from acclimate.ops.optimizers.adam.builder import CUDA_FLAGS


class FusedLambBuilder(OpBuilder):
    """LAMB on a CUDA device; ``load()`` gives DeepSpeed's ``lamb``."""

    name: ClassVar[str] = "fused_lamb"

    def sources(self) -> list[str | Source]:
        """Three kernels, each launched once for a whole parameter group."""
        return [Source("csrc/lamb.cu", flags=CUDA_FLAGS)]

    def define(self) -> None:
        """Defines ``acclimate::lamb_``."""
        from acclimate.ops.optimizers.lamb import schema

        schema.define()

    def module(self) -> ModuleType:
        """DeepSpeed's functions of its op of this name."""
        from acclimate.ops.optimizers.lamb import fused_module

        return fused_module
