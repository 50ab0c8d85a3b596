"""Adagrad in plain torch: what ``acclimate::adagrad_`` does where no native kernel is loaded for a device."""

from __future__ import annotations

from torch import Tensor

from acclimate.ops.optimizers.checks import check_sizes
from acclimate.ops.optimizers.rounding import square_root


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
    """One step of Adagrad on each parameter; see :class:`acclimate.ops.CPUAdagrad`.

    The operations and their order are those of csrc/adagrad_rule.h, one rounding each, so that results are
    the same bits.
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
