"""Builders of the Adam ops."""

from __future__ import annotations

from typing import ClassVar

from acclimate.ops.optimizers.builder import OptimizerBuilder


class CPUAdamBuilder(OptimizerBuilder):
    """Adam on the host; ``load()`` returns DeepSpeed's ``create_adam``, ``adam_update``, …"""

    name = "cpu_adam"
    source: ClassVar[str | None] = "csrc/adam.cpp"
    functions = "cpu_module"


class FusedAdamCPUBuilder(CPUAdamBuilder):
    """The library of :class:`CPUAdamBuilder`; ``load()`` returns DeepSpeed's ``multi_tensor_adam``."""

    functions = "fused_module"


class FusedAdamBuilder(OptimizerBuilder):
    """Adam on a CUDA device; ``load()`` returns DeepSpeed's ``multi_tensor_adam``."""

    name = "fused_adam"
    source: ClassVar[str | None] = "csrc/adam.cu"
    functions = "fused_module"


class TorchFusedAdamBuilder(FusedAdamBuilder):
    """Adam on any other device: torch's own fused kernel if there is one, else plain torch."""

    source = None
