"""Adam and AdamW: CPUAdam for host parameters, FusedAdam for parameters on any device."""

from acclimate.ops.optimizers.adam.optimizers import CPUAdam, FusedAdam

__all__ = ["CPUAdam", "FusedAdam"]
