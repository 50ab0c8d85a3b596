"""Defines ``acclimate::adagrad_``."""

from __future__ import annotations

from typing import Any

from acclimate.ops.optimizers.adagrad.plain import adagrad_
from acclimate.ops.registry import define_in_place

# csrc/adagrad.cpp takes its arguments in this order.
SCHEMA = (
    "adagrad_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] sums, Tensor(c!)[] steps, "
    "Tensor(d!)[] outputs, *, float lr, float lr_decay, float weight_decay, float eps, bool maximize=False, "
    "float grad_scale=1.0, int isa=0) -> ()"
)


def define() -> Any:
    """Defines the op, once per process, and returns it."""
    return define_in_place(SCHEMA, adagrad_)
