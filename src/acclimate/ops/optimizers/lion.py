"""Lion: the op ``acclimate::lion_``, CPULion for host parameters, FusedLion for any device.

The op has a version in plain torch for devices without a native kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.optimizers.base import FusedOptimizer, GroupOptimizer, Parameters, update_group
from acclimate.ops.optimizers.builders import CPULionBuilder, FusedLionBuilder
from acclimate.ops.registry import define_in_place

# csrc/lion_call.h reads the arguments in this order.
SCHEMA = (
    "lion_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] steps, "
    "Tensor(d!)[] outputs, *, float lr, float beta1, float beta2, float weight_decay, bool maximize=False, "
    "float grad_scale=1.0, int isa=0) -> ()"
)
STATE_NAMES = ("exp_avg",)
"""The names of the states, in the order of the op's arguments."""


def define() -> Any:
    """Defines the op, once per process, and returns it."""
    return define_in_place(SCHEMA, lion_)


def lion_(*lists: list[Tensor], **settings: Any) -> None:
    """Runs one step of Lion on each parameter; see :class:`acclimate.ops.CPULion`.

    It rounds in the same places as csrc/lion_rule.h, so results have the same bits.
    """
    update_group(_update, lists, STATE_NAMES, **settings)


def _update(
    step: float, p: Tensor, g: Tensor, m: Tensor,
    *, lr: float, beta1: float, beta2: float, weight_decay: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    direction = (m * beta1 + g * (1.0 - beta1)).sign()
    return p * (1.0 - lr * weight_decay) - direction * lr, m * beta2 + g * (1.0 - beta2)


class _Lion(GroupOptimizer):
    """The base of CPULion and FusedLion."""

    define_op = staticmethod(define)
    state_names: ClassVar[tuple[str, ...]] = STATE_NAMES
    op_arguments: ClassVar[Mapping[str, str]] = {"lr": "lr", "weight_decay": "weight_decay"}
    counts_steps: ClassVar[bool] = False


class CPULion(_Lion):
    r"""Lion on the host, at the speed of its memory.

    For gradient :math:`g_t`, learning rate :math:`\gamma` and weight decay :math:`\lambda`:

    .. math::
        c_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
        \theta_t &= (1 - \gamma \lambda) \theta_{t-1} - \gamma \, \mathrm{sign}(c_t) \\
        m_t &= \beta_2 m_{t-1} + (1 - \beta_2) g_t

    with :math:`\mathrm{sign}(0) = 0`, as in the paper (DeepSpeed's Lion moves a parameter even if its
    gradient and momentum are zero). Paper: Chen et al., "Symbolic Discovery of Optimization Algorithms"
    (arXiv:2302.06675).

    All arithmetic is in float32, in one pass. Every instruction set gives the same bits, and so does plain
    torch without a compiler.

    Args, besides those that it shares with :class:`CPUAdam`:
        betas: weight of the momentum in the direction, and its decay; each in [0, 1).
        weight_decay: decoupled.

    Raises:
        InvalidOptimizerArgumentError: a setting is out of range or of the wrong kind.
        UnsupportedParameterError: a parameter has another dtype or is not on the host.
    """

    builders: ClassVar[Mapping[str, type[OpBuilder]]] = {"cpu": CPULionBuilder}
    elsewhere: ClassVar[str | None] = "FusedLion"

    def __init__(
        self,
        model_params: Parameters,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
    ) -> None:
        if state_dtype is None and fp32_optimizer_states:
            state_dtype = torch.float32
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(model_params, defaults, state_dtype=state_dtype, master_weights=master_weights)


class FusedLion(FusedOptimizer, _Lion):
    """:class:`CPULion` for parameters on any device: one call, and on CUDA one launch, for a whole group.

    Runs CPULion's kernel on the host, this package's kernel on CUDA, and plain torch on other devices.
    :class:`CPULion` has the update rule and its paper. As in DeepSpeed, the default dtype of the state is the
    parameter's.

    Args, besides those of :class:`CPULion`:
        params: parameters, parameter groups or named parameters; float32, bfloat16 or float16.
        set_grad_none: the default of :meth:`zero_grad`'s argument.
        state_dtype: the state's dtype; ``None``: each parameter's.

    Raises:
        InvalidOptimizerArgumentError: a setting is out of range or of the wrong kind.
        UnsupportedParameterError: a parameter has another dtype.
    """

    builders: ClassVar[Mapping[str, type[OpBuilder]]] = {
        "cpu": CPULionBuilder,
        "cuda": FusedLionBuilder,
    }

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
    ) -> None:
        self.set_grad_none = set_grad_none
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, state_dtype=state_dtype, master_weights=master_weights)
