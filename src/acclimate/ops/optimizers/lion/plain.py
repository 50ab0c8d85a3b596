"""Lion in plain torch: what ``acclimate::lion_`` does where no native kernel is loaded for a device."""

from __future__ import annotations

from torch import Tensor

from acclimate.ops.optimizers.checks import check_sizes


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
    """One step of Lion on each parameter; see :class:`acclimate.ops.CPULion`.

    The operations and their order are those of csrc/lion_rule.h, one rounding each, so that results are the
    same bits.
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
