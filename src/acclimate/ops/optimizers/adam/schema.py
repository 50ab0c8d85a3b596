"""Defines ``acclimate::adam_``."""

from __future__ import annotations

from typing import Any

from acclimate.ops.optimizers.adam.plain import adam_
from acclimate.ops.registry import define_in_place

# csrc/adam.cpp and csrc/adam.cu take their arguments in this order.
SCHEMA = (
    "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] steps, Tensor(e!)[] outputs, *, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, bool decoupled, bool bias_correction, bool maximize=False, float grad_scale=1.0, "
    "int isa=0) -> ()"
)


def define() -> Any:
    """Defines the op, once per process, and returns it."""
    return define_in_place(SCHEMA, adam_)
