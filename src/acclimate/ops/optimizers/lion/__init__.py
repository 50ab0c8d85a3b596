"""Lion: on the host (CPULion), and for whole groups on any device (FusedLion)."""

from acclimate.ops.optimizers.lion.optimizers import CPULion, FusedLion

__all__ = ["CPULion", "FusedLion"]
