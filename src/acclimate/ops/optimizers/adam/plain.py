"""The op ``acclimate::adam_``: its schema, and Adam in plain torch for devices without a native kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from acclimate.ops.optimizers.checks import are_laid_out_alike, check_sizes
from acclimate.ops.optimizers.plain_group import rows, update_group
from acclimate.ops.optimizers.rounding import square_root
from acclimate.ops.registry import define_in_place

# csrc/adam.cpp and csrc/adam.cu read the arguments in this order.
SCHEMA = (
    "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] steps, Tensor(e!)[] outputs, *, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, bool decoupled, bool bias_correction, bool maximize=False, float grad_scale=1.0, "
    "int isa=0) -> ()"
)
STATE_NAMES = ("exp_avg", "exp_avg_sq")
"""The names of the states, in the order of the op's arguments."""


def define() -> Any:
    """Defines the op, once per process, and returns it."""
    return define_in_place(SCHEMA, adam_)


def adam_(*lists: list[Tensor], **settings: Any) -> None:
    """Runs one step of Adam (decoupled: AdamW) on each parameter; see :class:`acclimate.ops.CPUAdam`.

    On the host it rounds in the same places as csrc/adam_rule.h, so results have the same bits. On other
    devices it runs torch's fused kernel, if there is one, on the parameters that the kernel takes.
    """
    by_dtype, rest = _split(*lists, **settings)
    for indices in by_dtype.values():
        _update_by_torch(*rows(lists, indices), **settings)
    if rest:
        update_group(_update, rows(lists, rest), STATE_NAMES, **settings)


def _update(
    step: float, p: Tensor, g: Tensor, m: Tensor, v: Tensor,
    *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool,
    bias_correction: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = 1.0 - beta2**step if bias_correction else 1.0
    if decoupled:
        p = p * (1.0 - lr * weight_decay)
    elif weight_decay != 0.0:
        g = g + p * weight_decay
    # Equal in exact arithmetic; like torch.lerp, each form is exact at one end.
    weight = torch.tensor(1.0 - beta1, dtype=torch.float32)
    m = m + (g - m) * (1.0 - beta1) if weight < 0.5 else g - (g - m) * (1.0 - weight).item()
    v = v * beta2 + (g * (1.0 - beta2)) * g
    denominator = square_root(v) * (1.0 / math.sqrt(correction2)) + eps
    return p + (m * (-lr / correction1)) / denominator, m, v


def _split(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    steps: list[Tensor], outputs: list[Tensor],
    *, bias_correction: bool, grad_scale: float = 1.0, **settings: Any,
) -> tuple[dict[torch.dtype, list[int]], list[int]]:  # fmt: skip
    """Returns the indices of the parameters that torch's fused Adam takes, by their dtype, and of the others.

    It never runs on the host, where results equal native kernels'.
    """
    check_sizes(params, **{"gradient": grads, **dict(zip(STATE_NAMES, (exp_avgs, exp_avg_sqs), strict=True))})
    devices = {parameter.device.type for parameter in params}
    if (
        outputs
        or not bias_correction
        or grad_scale != 1.0
        or not devices <= set(_get_fused_kernels_supported_devices()) - {"cpu"}
    ):
        return {}, list(range(len(params)))
    by_dtype: dict[torch.dtype, list[int]] = {}
    rest = []
    for index, row in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        # torch's kernels read all of a row in the order of its memory, as one dtype.
        if len({tensor.dtype for tensor in row}) == 1 and are_laid_out_alike(row):
            by_dtype.setdefault(row[0].dtype, []).append(index)
        else:
            rest.append(index)
    return by_dtype, rest


def _update_by_torch(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    steps: list[Tensor], outputs: list[Tensor],
    *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool,
    bias_correction: bool, maximize: bool = False, grad_scale: float = 1.0, isa: int = 0,
) -> None:  # fmt: skip
    for counter in steps:
        counter.add_(1)
    fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
    device_steps = list(torch.stack(steps).to(params[0].device).unbind())
    fused(params, grads, exp_avgs, exp_avg_sqs, [], device_steps, lr=lr, beta1=beta1, beta2=beta2,
          weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=maximize)  # fmt: skip
