"""Builder of the Adagrad op."""

from __future__ import annotations

from acclimate.ops.optimizers.builder import OptimizerBuilder


class CPUAdagradBuilder(OptimizerBuilder):
    """Adagrad on the host; ``load()`` returns DeepSpeed's ``create_adagrad``, ``adagrad_update``, …"""

    name = "cpu_adagrad"
    source = "csrc/adagrad.cpp"
    functions = "cpu_module"
