"""Lion: CPULion for host parameters, FusedLion for parameters on any device."""

from acclimate.ops.optimizers.lion.optimizers import CPULion, FusedLion

__all__ = ["CPULion", "FusedLion"]
