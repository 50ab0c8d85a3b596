"""Builder of the LAMB op."""

from __future__ import annotations

from acclimate.ops.optimizers.builder import OptimizerBuilder


class FusedLambBuilder(OptimizerBuilder):
    """LAMB on a CUDA device; ``load()`` returns DeepSpeed's ``lamb``."""

    name = "fused_lamb"
    source = "csrc/lamb.cu"
    functions = "fused_module"
