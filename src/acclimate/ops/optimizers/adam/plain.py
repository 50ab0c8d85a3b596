"""Adam in plain torch: what ``acclimate::adam_`` does where no native kernel is loaded for a device."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from acclimate.ops.optimizers.checks import check_sizes
from acclimate.ops.optimizers.rounding import square_root


def adam_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    outputs: list[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
    maximize: bool = False,
    grad_scale: float = 1.0,
    isa: int = 0,
) -> None:
    """One step of Adam (decoupled: AdamW) on each parameter; see :class:`acclimate.ops.CPUAdam`.

    On the host the operations and their order are those of csrc/adam_rule.h, one rounding each, so results
    are the same bits. Elsewhere torch's fused kernel runs where it can.
    """
    check_sizes(params, gradient=grads, exp_avg=exp_avgs, exp_avg_sq=exp_avg_sqs, output=outputs)
    for counter in steps:
        counter.add_(1)
    if bias_correction and not outputs and grad_scale == 1.0 and _torch_has_kernel(params, grads, exp_avgs):
        fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
        device_steps = list(torch.stack(steps).to(params[0].device).unbind())
        fused(params, grads, exp_avgs, exp_avg_sqs, [], device_steps, lr=lr, beta1=beta1, beta2=beta2,
              weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=maximize)  # fmt: skip
        return
    scale = -grad_scale if maximize else grad_scale
    for i, param in enumerate(params):
        step_count = steps[i].item()
        correction1 = 1.0 - beta1**step_count if bias_correction else 1.0
        correction2 = 1.0 - beta2**step_count if bias_correction else 1.0
        p, g, m, v = (tensor.float() for tensor in (param, grads[i], exp_avgs[i], exp_avg_sqs[i]))
        g = g * scale
        if weight_decay != 0.0 and not decoupled:
            g = g + p * weight_decay
        if decoupled:
            p = p * (1.0 - lr * weight_decay)
        # Both are the same sum; each is exact at its own end, as in torch.lerp.
        weight = torch.tensor(1.0 - beta1, dtype=torch.float32)
        m = m + (g - m) * (1.0 - beta1) if weight < 0.5 else g - (g - m) * (1.0 - weight).item()
        v = v * beta2 + (g * (1.0 - beta2)) * g
        denominator = square_root(v) * (1.0 / math.sqrt(correction2)) + eps
        p = p + (m * (-lr / correction1)) / denominator
        param.copy_(p)
        exp_avgs[i].copy_(m)
        exp_avg_sqs[i].copy_(v)
        if outputs:
            outputs[i].copy_(p)


def _torch_has_kernel(params: list[Tensor], grads: list[Tensor], states: list[Tensor]) -> bool:
    """Whether torch's fused Adam takes these; never on the host, where results are to be as native ones."""
    device = params[0].device
    dtypes = {tensor.dtype for tensor in (*params, *grads, *states)}
    return (
        device.type not in ("cpu", "meta")
        and device.type in _get_fused_kernels_supported_devices()
        and len(dtypes) == 1
    )
