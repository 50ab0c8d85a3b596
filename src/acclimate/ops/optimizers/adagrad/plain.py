"""The op ``acclimate::adagrad_``: its schema, and Adagrad in plain torch where no native kernel is loaded."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from acclimate.ops.optimizers.checks import check_sizes
from acclimate.ops.optimizers.rounding import square_root
from acclimate.ops.registry import define_in_place

# csrc/adagrad.cpp reads the arguments in this order.
SCHEMA = (
    "adagrad_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] sums, Tensor(c!)[] steps, "
    "Tensor(d!)[] outputs, *, float lr, float lr_decay, float weight_decay, float eps, bool maximize=False, "
    "float grad_scale=1.0, int isa=0) -> ()"
)


def define() -> Any:
    """Defines the op, once per process, and returns it."""
    return define_in_place(SCHEMA, adagrad_)


def adagrad_(
    params: list[Tensor],
    grads: list[Tensor],
    sums: list[Tensor],
    steps: list[Tensor],
    outputs: list[Tensor],
    *,
    lr: float,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool = False,
    grad_scale: float = 1.0,
    isa: int = 0,
) -> None:
    """Runs one step of Adagrad on each parameter; see :class:`acclimate.ops.CPUAdagrad`.

    It rounds in the same places as csrc/adagrad_rule.h, so results have the same bits.
    """
    check_sizes(params, gradient=grads, sum=sums, output=outputs)
    scale = -grad_scale if maximize else grad_scale
    for i, param in enumerate(params):
        steps[i].add_(1)
        negative_lr = -lr / (1.0 + (steps[i].item() - 1.0) * lr_decay)
        p, g, total = (tensor.float() for tensor in (param, grads[i], sums[i]))
        g = g * scale
        if weight_decay != 0.0:
            g = g + p * weight_decay
        total = total + g * g
        p = p + (g * negative_lr) / (square_root(total) + eps)
        param.copy_(p)
        sums[i].copy_(total)
        if outputs:
            outputs[i].copy_(p)
