"""LAMB, for parameters on any device."""

from acclimate.ops.optimizers.lamb.optimizer import FusedLamb

__all__ = ["FusedLamb"]
