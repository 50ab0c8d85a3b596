"""The op ``acclimate::adam_``: its schema, and Adam in plain torch for devices without a native kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from acclimate.ops.optimizers.checks import check_sizes
from acclimate.ops.optimizers.rounding import square_root
from acclimate.ops.registry import define_in_place

# csrc/adam.cpp and csrc/adam.cu read the arguments in this order.
SCHEMA = (
    "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] steps, Tensor(e!)[] outputs, *, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, bool decoupled, bool bias_correction, bool maximize=False, float grad_scale=1.0, "
    "int isa=0) -> ()"
)


def define() -> Any:
    """Defines the op, once per process, and returns it."""
    return define_in_place(SCHEMA, adam_)


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
    """Runs one step of Adam (decoupled: AdamW) on each parameter; see :class:`acclimate.ops.CPUAdam`.

    On the host it rounds in the same places as csrc/adam_rule.h, so results have the same bits. On other
    devices it runs torch's fused kernel if there is one.
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
        # Equal in exact arithmetic; like torch.lerp, each form is exact at one end.
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
    """Whether torch's fused Adam takes these; never on the host, whose results equal the native kernels'."""
    device = params[0].device
    dtypes = {tensor.dtype for tensor in (*params, *grads, *states)}
    return (
        device.type not in ("cpu", "meta")
        and device.type in _get_fused_kernels_supported_devices()
        and len(dtypes) == 1
    )
