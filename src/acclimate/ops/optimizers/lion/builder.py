"""Builders of the Lion ops."""

from __future__ import annotations

from acclimate.ops.optimizers.builder import OptimizerBuilder


class CPULionBuilder(OptimizerBuilder):
    """Lion on the host; ``load()`` returns DeepSpeed's ``create_lion``, ``lion_update``, …"""

    name = "cpu_lion"
    source = "csrc/lion.cpp"
    functions = "cpu_module"


class FusedLionCPUBuilder(CPULionBuilder):
    """The library of :class:`CPULionBuilder`; ``load()`` returns DeepSpeed's ``multi_tensor_lion``."""

    functions = "fused_module"


class FusedLionBuilder(OptimizerBuilder):
    """Lion on a CUDA device; ``load()`` returns DeepSpeed's ``multi_tensor_lion``."""

    name = "fused_lion"
    source = "csrc/lion.cu"
    functions = "fused_module"
