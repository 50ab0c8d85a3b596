"""Builder of the LAMB op."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

from acclimate.ops.builder import OpBuilder


class FusedLambBuilder(OpBuilder):
    """LAMB on a CUDA device; ``load()`` gives DeepSpeed's ``lamb``."""

    name: ClassVar[str] = "fused_lamb"

    def sources(self) -> list[str]:
        """Three kernels, each launched once for a whole parameter group."""
        return ["csrc/lamb.cu"]

    def define(self) -> None:
        """Defines ``acclimate::lamb_``."""
        from acclimate.ops.lamb import schema

        schema.define()

    def module(self) -> ModuleType:
        """DeepSpeed's functions of its op of this name."""
        from acclimate.ops.lamb import fused_module

        return fused_module
