"""Builders of the optimizers' ops: each declares its folder, its source and the module of its functions."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import ClassVar

from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.build.recipe import Source
from acclimate.ops.simd import KERNEL_FLAGS

# No fused multiply-add on CUDA either: see KERNEL_FLAGS.
_CUDA_FLAGS = ("-fmad=false",)


class OptimizerBuilder(OpBuilder):
    """An optimizer's op: its schema is in the module ``plain`` of the optimizer's folder."""

    folder: ClassVar[str]
    """The optimizer's folder, beside this file."""
    source: ClassVar[str | None]
    """The native source in ``csrc``; ``None`` for an op that runs in plain torch."""
    functions: ClassVar[str]
    """The module there with the functions of DeepSpeed's op of this name."""

    def sources(self) -> list[str | Source]:
        """Returns one file, with all instruction sets for the host or with the CUDA kernel."""
        if self.source is None:
            return []
        path = f"csrc/{self.source}"
        return [Source(path, flags=_CUDA_FLAGS) if path.endswith(".cu") else path]

    def include_paths(self) -> list[str]:
        """Returns the folder of the update rules: a macro includes one, so it must be in the cache key."""
        return ["csrc"]

    def cxx_args(self) -> list[str]:
        """Returns the flags that make all instruction sets give the same bits."""
        return list(KERNEL_FLAGS)

    def define(self) -> None:
        """Defines the op in torch."""
        self._module("plain").define()

    def module(self) -> ModuleType:
        """Returns the module with the functions of DeepSpeed's op of this name."""
        return self._module(self.functions)

    def _module(self, name: str) -> ModuleType:
        return import_module(f"{__package__}.{self.folder}.{name}")


class CPUAdamBuilder(OptimizerBuilder):
    """Adam on the host; ``load()`` returns DeepSpeed's ``create_adam``, ``adam_update``, …"""

    name = "cpu_adam"
    folder = "adam"
    source = "adam.cpp"
    functions = "cpu_module"


class FusedAdamCPUBuilder(CPUAdamBuilder):
    """The library of :class:`CPUAdamBuilder`; ``load()`` returns DeepSpeed's ``multi_tensor_adam``."""

    functions = "fused_module"


class FusedAdamBuilder(OptimizerBuilder):
    """Adam on a CUDA device; ``load()`` returns DeepSpeed's ``multi_tensor_adam``."""

    name = "fused_adam"
    folder = "adam"
    source: ClassVar[str | None] = "adam.cu"
    functions = "fused_module"


class TorchFusedAdamBuilder(FusedAdamBuilder):
    """Adam on any other device: torch's own fused kernel if there is one, else plain torch."""

    source = None


class CPULionBuilder(OptimizerBuilder):
    """Lion on the host; ``load()`` returns DeepSpeed's ``create_lion``, ``lion_update``, …"""

    name = "cpu_lion"
    folder = "lion"
    source = "lion.cpp"
    functions = "cpu_module"


class FusedLionCPUBuilder(CPULionBuilder):
    """The library of :class:`CPULionBuilder`; ``load()`` returns DeepSpeed's ``multi_tensor_lion``."""

    functions = "fused_module"


class FusedLionBuilder(OptimizerBuilder):
    """Lion on a CUDA device; ``load()`` returns DeepSpeed's ``multi_tensor_lion``."""

    name = "fused_lion"
    folder = "lion"
    source = "lion.cu"
    functions = "fused_module"


class CPUAdagradBuilder(OptimizerBuilder):
    """Adagrad on the host; ``load()`` returns DeepSpeed's ``create_adagrad``, ``adagrad_update``, …"""

    name = "cpu_adagrad"
    folder = "adagrad"
    source = "adagrad.cpp"
    functions = "cpu_module"


class FusedLambBuilder(OptimizerBuilder):
    """LAMB on a CUDA device; ``load()`` returns DeepSpeed's ``lamb``."""

    name = "fused_lamb"
    folder = "lamb"
    source = "lamb.cu"
    functions = "fused_module"
