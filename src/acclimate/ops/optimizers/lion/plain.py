"""The op ``acclimate::lion_``: its schema, and Lion in plain torch for devices without a native kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from acclimate.ops.optimizers.checks import check_sizes
from acclimate.ops.registry import define_in_place

# csrc/lion.cpp and csrc/lion.cu read the arguments in this order.
SCHEMA = (
    "lion_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] steps, "
    "Tensor(d!)[] outputs, *, float lr, float beta1, float beta2, float weight_decay, bool maximize=False, "
    "float grad_scale=1.0, int isa=0) -> ()"
)


def define() -> Any:
    """Defines the op, once per process, and returns it."""
    return define_in_place(SCHEMA, lion_)


def lion_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    steps: list[Tensor],
    outputs: list[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool = False,
    grad_scale: float = 1.0,
    isa: int = 0,
) -> None:
    """Runs one step of Lion on each parameter; see :class:`acclimate.ops.CPULion`.

    It rounds in the same places as csrc/lion_rule.h, so results have the same bits.
    """
    check_sizes(params, gradient=grads, exp_avg=exp_avgs, output=outputs)
    scale = -grad_scale if maximize else grad_scale
    for i, param in enumerate(params):
        steps[i].add_(1)
        p, g, m = (tensor.float() for tensor in (param, grads[i], exp_avgs[i]))
        g = g * scale
        direction = (m * beta1 + g * (1.0 - beta1)).sign()
        p = p * (1.0 - lr * weight_decay) - direction * lr
        m = m * beta2 + g * (1.0 - beta2)
        param.copy_(p)
        exp_avgs[i].copy_(m)
        if outputs:
            outputs[i].copy_(p)
