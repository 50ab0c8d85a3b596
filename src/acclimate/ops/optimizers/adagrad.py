"""Adagrad on the host: the op ``acclimate::adagrad_``, and CPUAdagrad.

The op has a version in plain torch where no native kernel is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from acclimate.errors import InvalidOptimizerArgumentError
from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.optimizers.base import GroupOptimizer, Parameters, square_root, update_group
from acclimate.ops.optimizers.builders import CPUAdagradBuilder
from acclimate.ops.registry import define_in_place

# csrc/adagrad.cpp reads the arguments in this order.
SCHEMA = (
    "adagrad_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] sums, Tensor(c!)[] steps, "
    "Tensor(d!)[] outputs, *, float lr, float lr_decay, float weight_decay, float eps, bool maximize=False, "
    "float grad_scale=1.0, int isa=0) -> ()"
)
STATE_NAMES = ("sum",)
"""The names of the states, in the order of the op's arguments."""


def define() -> Any:
    """Defines the op, once per process, and returns it."""
    return define_in_place(SCHEMA, adagrad_)


def adagrad_(*lists: list[Tensor], **settings: Any) -> None:
    """Runs one step of Adagrad on each parameter; see :class:`acclimate.ops.CPUAdagrad`.

    It rounds in the same places as csrc/adagrad_rule.h, so results have the same bits.
    """
    update_group(_update, lists, STATE_NAMES, **settings)


def _update(
    step: float, p: Tensor, g: Tensor, total: Tensor,
    *, lr: float, lr_decay: float, weight_decay: float, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    negative_lr = -lr / (1.0 + (step - 1.0) * lr_decay)
    if weight_decay != 0.0:
        g = g + p * weight_decay
    total = total + g * g
    return p + (g * negative_lr) / (square_root(total) + eps), total


class CPUAdagrad(GroupOptimizer):
    r"""Adagrad on the host, at the speed of its memory.

    For gradient :math:`g_t`, learning rate :math:`\gamma`, its decay :math:`\eta` and weight decay
    :math:`\lambda` (L2):

    .. math::
        g_t &\leftarrow g_t + \lambda \theta_{t-1} \\
        s_t &= s_{t-1} + g_t^2 \\
        \theta_t &= \theta_{t-1} - \frac{\gamma}{1 + (t - 1) \eta} \frac{g_t}{\sqrt{s_t} + \epsilon}

    Paper: Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization" (JMLR 12, 2011).

    All arithmetic is in float32, in one pass. Every instruction set gives the same bits, and so does plain
    torch without a compiler. ``torch.optim.Adagrad`` and this optimizer can load each other's
    ``state_dict()``.

    Args, besides those that it shares with :class:`CPUAdam`:
        weight_decay: L2.
        lr_decay: decay of the learning rate.
        initial_accumulator_value: the first value of the sum of squares.

    Raises:
        InvalidOptimizerArgumentError: a setting is out of range or of the wrong kind.
        UnsupportedParameterError: a parameter has another dtype or is not on the host.
    """

    define_op = staticmethod(define)
    state_names: ClassVar[tuple[str, ...]] = STATE_NAMES
    op_arguments: ClassVar[Mapping[str, str]] = {
        name: name for name in ("lr", "lr_decay", "weight_decay", "eps")
    }
    builders: ClassVar[Mapping[str, type[OpBuilder]]] = {"cpu": CPUAdagradBuilder}
    elsewhere: ClassVar[str | None] = "torch.optim.Adagrad"
    initial_setting: ClassVar[str | None] = "initial_accumulator_value"

    def __init__(
        self,
        model_params: Parameters,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        *,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            raise InvalidOptimizerArgumentError("Adagrad has no AMSGrad variant. Do not pass amsgrad.")
        if state_dtype is None and fp32_optimizer_states:
            state_dtype = torch.float32
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        super().__init__(model_params, defaults, state_dtype=state_dtype, master_weights=master_weights)
