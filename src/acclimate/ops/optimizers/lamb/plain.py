"""The op ``acclimate::lamb_``: its schema, and LAMB in plain torch for devices without a native kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from acclimate.ops.optimizers.plain_group import update_group
from acclimate.ops.registry import define_in_place

# csrc/lamb.cu reads the arguments in this order.
SCHEMA = (
    "lamb_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] steps, Tensor(e!)[] outputs, Tensor(f!) ratios, *, float lr, float beta1, float beta2, "
    "float eps, float weight_decay, float min_ratio, float max_ratio, bool bias_correction, "
    "bool corrects_rate=False, bool eps_inside_sqrt=False, bool maximize=False, float grad_scale=1.0) -> ()"
)
STATE_NAMES = ("exp_avg", "exp_avg_sq")
"""The names of the states, in the order of the op's arguments."""


def define() -> Any:
    """Defines the op, once per process, and returns it."""
    return define_in_place(SCHEMA, lamb_)


def lamb_(*arguments: Any, **settings: Any) -> None:
    """Runs one step of LAMB on each parameter and writes the trust ratios to the last argument (float32).

    ``corrects_rate`` applies the bias correction to the learning rate instead of the moments, as DeepSpeed
    does. :class:`acclimate.ops.FusedLamb` and :class:`GroupTensors` describe the other arguments.
    """
    *lists, ratios = arguments
    places = iter(ratios)

    def update(*given: Any, **settings: Any) -> Sequence[Tensor]:
        ratio, *new = _update(*given, **settings)
        next(places).copy_(ratio)
        return new

    update_group(update, lists, STATE_NAMES, **settings)


def _update(
    step: float, p: Tensor, g: Tensor, m: Tensor, v: Tensor,
    *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, min_ratio: float,
    max_ratio: float, bias_correction: bool, corrects_rate: bool = False, eps_inside_sqrt: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Returns the trust ratio, the new parameter and the new moments."""
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = 1.0 - beta2**step if bias_correction else 1.0
    if corrects_rate:
        lr, correction1, correction2 = lr * correction2**0.5 / correction1, 1.0, 1.0
    m = m * beta1 + g * (1.0 - beta1)
    v = v * beta2 + (g * (1.0 - beta2)) * g
    corrected = v / correction2
    denominator = (corrected + eps).sqrt() if eps_inside_sqrt else corrected.sqrt() + eps
    update = (m / correction1) / denominator + p * weight_decay
    ratio = _trust_ratio(p.norm(), update.norm(), min_ratio, max_ratio)
    return ratio, p - update * (ratio * lr), m, v


def _trust_ratio(weight_norm: Tensor, update_norm: Tensor, least: float, greatest: float) -> Tensor:
    """Returns the ratio of the weight's norm to the update's, within bounds; 1 if either is zero."""
    ratio = (weight_norm / update_norm).clamp(least, greatest)
    return torch.where((weight_norm == 0) | (update_norm == 0), torch.ones_like(ratio), ratio)
