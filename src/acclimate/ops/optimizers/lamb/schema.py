"""Defines ``acclimate::lamb_``."""

from __future__ import annotations

from typing import Any

from acclimate.ops.optimizers.lamb.plain import lamb_
from acclimate.ops.registry import define_in_place

# csrc/lamb.cu takes its arguments in this order.
SCHEMA = (
    "lamb_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] steps, Tensor(e!)[] outputs, Tensor(f!) ratios, *, float lr, float beta1, float beta2, "
    "float eps, float weight_decay, float min_ratio, float max_ratio, bool bias_correction, "
    "bool corrects_rate=False, bool eps_inside_sqrt=False, bool maximize=False, float grad_scale=1.0) -> ()"
)


def define() -> Any:
    """Defines the op, once per process, and returns it."""
    return define_in_place(SCHEMA, lamb_)
