"""Adagrad on the host."""

from acclimate.ops.optimizers.adagrad.optimizer import CPUAdagrad

__all__ = ["CPUAdagrad"]
