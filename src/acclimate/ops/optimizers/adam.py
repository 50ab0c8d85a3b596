"""Adam and AdamW: the op ``acclimate::adam_``, CPUAdam for host parameters, FusedAdam for any device.

The op has a version in plain torch for devices without a native kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.optimizers.base import (
    FusedOptimizer,
    GroupOptimizer,
    Parameters,
    rows,
    square_root,
    update_group,
)
from acclimate.ops.optimizers.builders import CPUAdamBuilder, FusedAdamBuilder
from acclimate.ops.optimizers.checks import are_laid_out_alike, check_sizes
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


class _Adam(GroupOptimizer):
    """The base of CPUAdam and FusedAdam."""

    define_op = staticmethod(define)
    state_names: ClassVar[tuple[str, ...]] = STATE_NAMES
    op_arguments: ClassVar[Mapping[str, str]] = {
        "lr": "lr",
        "eps": "eps",
        "weight_decay": "weight_decay",
        "decoupled": "decoupled_weight_decay",
        "bias_correction": "bias_correction",
    }


class CPUAdam(_Adam):
    r"""Adam and AdamW on the host, at the speed of its memory.

    For gradient :math:`g_t`, with :math:`\lambda` the weight decay and :math:`\gamma` the learning rate:

    .. math::
        g_t &\leftarrow g_t + \lambda \theta_{t-1} \quad \text{(L2: Adam)} \\
        \theta_t &\leftarrow (1 - \gamma \lambda) \theta_{t-1} \quad \text{(decoupled: AdamW)} \\
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        \theta_t &\leftarrow \theta_t - \gamma \frac{m_t / (1 - \beta_1^t)}
            {\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    Papers: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (arXiv:1412.6980); Loshchilov and
    Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101).

    All arithmetic is in float32. One pass reads each value, converts it, rounds the result once and writes
    it. Every instruction set gives the same bits, and so does plain torch without a compiler. The arguments
    are DeepSpeedCPUAdam's and three more; ``torch.optim.AdamW`` and this optimizer can load each other's
    ``state_dict()``.

    Args:
        model_params: parameters on the host, parameter groups or named parameters; float32, bfloat16 or
            float16, as their gradients.
        lr: learning rate.
        bias_correction: divides the moments by :math:`1 - \beta^t`.
        betas: decay of the moments, each in [0, 1).
        eps: added to the denominator.
        weight_decay: see ``adamw_mode``.
        amsgrad: must be ``False``.
        adamw_mode: decoupled weight decay; ``False``: L2.
        fp32_optimizer_states: keeps state in float32; ``False``: in each parameter's dtype.
        maximize: maximizes the objective.
        state_dtype: the state's dtype, instead of ``fp32_optimizer_states``.
        master_weights: keeps a float32 copy of each 16-bit parameter in the state, updates the copy, and
            writes the parameter from it in the same pass.

    Raises:
        InvalidOptimizerArgumentError: a setting is out of range or of the wrong kind.
        UnsupportedParameterError: a parameter has another dtype or is not on the host.
    """

    builders: ClassVar[Mapping[str, type[OpBuilder]]] = {"cpu": CPUAdamBuilder}
    elsewhere: ClassVar[str | None] = "FusedAdam"

    def __init__(
        self,
        model_params: Parameters,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
    ) -> None:
        if state_dtype is None and fp32_optimizer_states:
            state_dtype = torch.float32
        # Named as in torch.optim.AdamW, so that each can load the other's state.
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                    "bias_correction": bias_correction, "amsgrad": amsgrad, "maximize": maximize,
                    "decoupled_weight_decay": adamw_mode}  # fmt: skip
        super().__init__(model_params, defaults, state_dtype=state_dtype, master_weights=master_weights)


class FusedAdam(FusedOptimizer, _Adam):
    """:class:`CPUAdam` for parameters on any device: one call, and on CUDA one launch, for a whole group.

    Runs CPUAdam's kernel on the host and this package's kernel on CUDA. On other devices it runs torch's own
    fused Adam if there is one, else plain torch. :class:`CPUAdam` has the update rule and its papers. As in
    DeepSpeed and torch, the default dtype of the state is the parameter's.

    Args, besides those of :class:`CPUAdam`:
        params: parameters, parameter groups or named parameters; float32, bfloat16 or float16.
        adam_w_mode: decoupled weight decay; ``False``: L2.
        set_grad_none: the default of :meth:`zero_grad`'s argument.
        state_dtype: the state's dtype; ``None``: each parameter's.

    Raises:
        InvalidOptimizerArgumentError: a setting is out of range or of the wrong kind.
        UnsupportedParameterError: a parameter has another dtype.
    """

    builders: ClassVar[Mapping[str, type[OpBuilder]]] = {
        "cpu": CPUAdamBuilder,
        "cuda": FusedAdamBuilder,
    }

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
    ) -> None:
        self.set_grad_none = set_grad_none
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                    "bias_correction": bias_correction, "amsgrad": amsgrad, "maximize": maximize,
                    "decoupled_weight_decay": adam_w_mode}  # fmt: skip
        super().__init__(params, defaults, state_dtype=state_dtype, master_weights=master_weights)
