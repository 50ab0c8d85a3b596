"""LAMB in plain torch: what ``acclimate::lamb_`` does where no native kernel is loaded for a device."""

from __future__ import annotations

import torch
from torch import Tensor

from acclimate.ops.optimizers.checks import check_sizes


def lamb_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    outputs: list[Tensor],
    ratios: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    min_ratio: float,
    max_ratio: float,
    bias_correction: bool,
    corrects_rate: bool = False,
    eps_inside_sqrt: bool = False,
    maximize: bool = False,
    grad_scale: float = 1.0,
) -> None:
    """One step of LAMB on each parameter; see :class:`acclimate.ops.FusedLamb`.

    Args:
        params: parameters.
        grads: their gradients.
        exp_avgs: first moments.
        exp_avg_sqs: second moments.
        steps: how often each was updated before; counted up.
        outputs: what to write the new parameters to as well; empty, or one for each.
        ratios: float32, one number for each parameter: receives the trust ratios.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        weight_decay: joins the update before its norm is taken.
        min_ratio: the least trust ratio.
        max_ratio: the greatest.
        bias_correction: whether moments are corrected for starting at zero.
        corrects_rate: corrects the learning rate instead of the moments, as DeepSpeed does.
        eps_inside_sqrt: adds ``eps`` to the second moment before its root is taken.
        maximize: go up the gradient.
        grad_scale: multiplies the gradients.
    """
    check_sizes(params, gradient=grads, exp_avg=exp_avgs, exp_avg_sq=exp_avg_sqs, output=outputs)
    scale = -grad_scale if maximize else grad_scale
    for i, param in enumerate(params):
        steps[i].add_(1)
        count = steps[i].item()
        correction1 = 1.0 - beta1**count if bias_correction else 1.0
        correction2 = 1.0 - beta2**count if bias_correction else 1.0
        rate = lr
        if corrects_rate:
            rate, correction1, correction2 = lr * correction2**0.5 / correction1, 1.0, 1.0
        p, g, m, v = (tensor.float() for tensor in (param, grads[i], exp_avgs[i], exp_avg_sqs[i]))
        g = g * scale
        m = m * beta1 + g * (1.0 - beta1)
        v = v * beta2 + (g * (1.0 - beta2)) * g
        corrected = v / correction2
        denominator = (corrected + eps).sqrt() if eps_inside_sqrt else corrected.sqrt() + eps
        update = (m / correction1) / denominator + p * weight_decay
        ratio = _trust_ratio(p.norm(), update.norm(), min_ratio, max_ratio)
        p = p - update * (ratio * rate)
        param.copy_(p)
        exp_avgs[i].copy_(m)
        exp_avg_sqs[i].copy_(v)
        ratios[i] = ratio
        if outputs:
            outputs[i].copy_(p)


def _trust_ratio(weight_norm: Tensor, update_norm: Tensor, least: float, greatest: float) -> Tensor:
    """The weight's norm over the update's, within bounds; 1 where either is zero."""
    ratio = (weight_norm / update_norm).clamp(least, greatest)
    return torch.where((weight_norm == 0) | (update_norm == 0), torch.ones_like(ratio), ratio)
