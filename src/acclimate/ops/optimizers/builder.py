"""The base of the optimizers' builders: each declares its source and the module of its functions."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import ClassVar

from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.build.recipe import Source

# Fused multiply-add would make the last bit depend on the instruction set; -fno-math-errno compiles a square
# root to one instruction; hidden symbols keep two libraries in one process apart.
_HOST_FLAGS = ("-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden")
# No fused multiply-add on CUDA either.
_CUDA_FLAGS = ("-fmad=false",)


class OptimizerBuilder(OpBuilder):
    """An optimizer's op: its schema is in the module ``plain`` beside the builder."""

    source: ClassVar[str | None]
    """The native source; ``None`` for an op that runs in plain torch."""
    functions: ClassVar[str]
    """The module, beside the builder, with the functions of DeepSpeed's op of this name."""

    def sources(self) -> list[str | Source]:
        """Returns one file, with all instruction sets for the host or with the CUDA kernel."""
        if self.source is None:
            return []
        return [Source(self.source, flags=_CUDA_FLAGS) if self.source.endswith(".cu") else self.source]

    def include_paths(self) -> list[str]:
        """Returns the folder of the update rule, which a macro includes: so it is in the cache key."""
        return ["csrc"]

    def cxx_args(self) -> list[str]:
        """Returns the flags that make all instruction sets give the same bits."""
        return list(_HOST_FLAGS)

    def define(self) -> None:
        """Defines the op in torch."""
        self._beside("plain").define()

    def module(self) -> ModuleType:
        """Returns the module with the functions of DeepSpeed's op of this name."""
        return self._beside(self.functions)

    def _beside(self, name: str) -> ModuleType:
        return import_module(f"{type(self).__module__.rpartition('.')[0]}.{name}")
