"""Builders of the optimizers' ops: each declares its optimizer and its source."""

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
    """An optimizer's op, whose ``load()`` returns DeepSpeed's functions."""

    optimizer: ClassVar[str]
    """The module beside this file that has the op's schema."""
    source: ClassVar[str | None]
    """The native source in ``csrc``; ``None`` for an op that runs in plain torch."""

    def sources(self) -> list[str | Source]:
        if self.source is None:
            return []
        path = f"csrc/{self.source}"
        return [Source(path, flags=_CUDA_FLAGS) if path.endswith(".cu") else path]

    def include_paths(self) -> list[str]:
        return ["csrc"]  # a macro includes an update rule, so its folder must be in the cache key

    def cxx_args(self) -> list[str]:
        return list(KERNEL_FLAGS)

    def define(self) -> None:
        import_module(f"{__package__}.{self.optimizer}").define()

    def module(self) -> ModuleType:
        return import_module(f"{__package__}.functions")


class CPUAdamBuilder(OptimizerBuilder):
    """Adam on the host: ``create_adam``, ``adam_update``, … and ``multi_tensor_adam``."""

    name = "cpu_adam"
    optimizer = "adam"
    source = "adam.cpp"


class FusedAdamBuilder(OptimizerBuilder):
    """Adam on a CUDA device: ``multi_tensor_adam``."""

    name = "fused_adam"
    optimizer = "adam"
    source: ClassVar[str | None] = "adam.cu"


class TorchFusedAdamBuilder(FusedAdamBuilder):
    """Adam on any other device: torch's own fused kernel if there is one, else plain torch."""

    source = None


class CPULionBuilder(OptimizerBuilder):
    """Lion on the host: ``create_lion``, ``lion_update``, … and ``multi_tensor_lion``."""

    name = "cpu_lion"
    optimizer = "lion"
    source = "lion.cpp"


class FusedLionBuilder(OptimizerBuilder):
    """Lion on a CUDA device: ``multi_tensor_lion``."""

    name = "fused_lion"
    optimizer = "lion"
    source = "lion.cu"


class CPUAdagradBuilder(OptimizerBuilder):
    """Adagrad on the host: ``create_adagrad``, ``adagrad_update``, …"""

    name = "cpu_adagrad"
    optimizer = "adagrad"
    source = "adagrad.cpp"


class FusedLambBuilder(OptimizerBuilder):
    """LAMB on a CUDA device: ``lamb``."""

    name = "fused_lamb"
    optimizer = "lamb"
    source = "lamb.cu"
