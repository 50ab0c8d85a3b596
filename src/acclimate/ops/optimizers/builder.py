"""What the builders of the optimizers share: each names a source, and the module whose functions it gives."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import ClassVar

from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.build.recipe import Source

# Contraction to fused multiply-add would give each instruction set its own last bit; -fno-math-errno lets
# a square root be one instruction; hidden symbols keep two libraries in one process apart.
_HOST_FLAGS = ("-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden")
# The same for CUDA, where products and sums are contracted unless told.
_CUDA_FLAGS = ("-fmad=false",)


class OptimizerBuilder(OpBuilder):
    """An optimizer's op: its schema is in the module ``schema`` beside the builder."""

    source: ClassVar[str | None]
    """The native source; ``None`` for an op that runs on plain torch."""
    functions: ClassVar[str]
    """The module beside the builder with DeepSpeed's functions of its op of this name."""

    def sources(self) -> list[str | Source]:
        """One file: on the host all instruction sets, on CUDA one launch for a whole parameter group."""
        if self.source is None:
            return []
        return [Source(self.source, flags=_CUDA_FLAGS) if self.source.endswith(".cu") else self.source]

    def include_paths(self) -> list[str]:
        """The folder of the rule, which a macro names, so that the cache key holds it."""
        return ["csrc"]

    def cxx_args(self) -> list[str]:
        """What keeps every instruction set to the same bits."""
        return list(_HOST_FLAGS)

    def define(self) -> None:
        """Defines the op that the library implements."""
        self._beside("schema").define()

    def module(self) -> ModuleType:
        """DeepSpeed's functions of its op of this name."""
        return self._beside(self.functions)

    def _beside(self, name: str) -> ModuleType:
        return import_module(f"{type(self).__module__.rpartition('.')[0]}.{name}")
