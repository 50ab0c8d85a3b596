"""Adagrad on the host."""

from acclimate.ops.adagrad.optimizer import CPUAdagrad

__all__ = ["CPUAdagrad"]
