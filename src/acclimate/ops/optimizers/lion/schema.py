"""Defines ``acclimate::lion_``."""

from __future__ import annotations

from typing import Any

from acclimate.ops.optimizers.lion.plain import lion_
from acclimate.ops.registry import define_in_place

# csrc/lion.cpp and csrc/lion.cu take their arguments in this order.
SCHEMA = (
    "lion_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] steps, "
    "Tensor(d!)[] outputs, *, float lr, float beta1, float beta2, float weight_decay, bool maximize=False, "
    "float grad_scale=1.0, int isa=0) -> ()"
)


def define() -> Any:
    """Defines the op, once per process, and returns it."""
    return define_in_place(SCHEMA, lion_)
