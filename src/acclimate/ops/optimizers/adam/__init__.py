"""Adam and AdamW: on the host (CPUAdam), and for whole groups on any device (FusedAdam)."""

from acclimate.ops.optimizers.adam.optimizers import CPUAdam, FusedAdam

__all__ = ["CPUAdam", "FusedAdam"]
