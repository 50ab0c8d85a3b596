"""CPULion and FusedLion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.optimizers.base import FusedOptimizer, GroupOptimizer, Parameters
from acclimate.ops.optimizers.checks import number
from acclimate.ops.optimizers.lion.builder import CPULionBuilder, FusedLionBuilder, FusedLionCPUBuilder
from acclimate.ops.optimizers.lion.schema import define


class _Lion(GroupOptimizer):
    """What CPULion and FusedLion share."""

    define_op = staticmethod(define)
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg",)
    counts_steps: ClassVar[bool] = False

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor,
        betas: tuple[float, float],
        weight_decay: float,
        maximize: bool,
        state_dtype: torch.dtype | None,
        master_weights: bool,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, state_dtype=state_dtype, master_weights=master_weights)

    def op_settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group's settings under the names of the op's arguments."""
        beta1, beta2 = group["betas"]
        return {
            "lr": number(group["lr"]),
            "beta1": number(beta1),
            "beta2": number(beta2),
            "weight_decay": group["weight_decay"],
        }


class CPULion(_Lion):
    r"""Lion on the host, at the speed of its memory.

    For gradient :math:`g_t`, learning rate :math:`\gamma` and weight decay :math:`\lambda`:

    .. math::
        c_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
        \theta_t &= (1 - \gamma \lambda) \theta_{t-1} - \gamma \, \mathrm{sign}(c_t) \\
        m_t &= \beta_2 m_{t-1} + (1 - \beta_2) g_t

    with :math:`\mathrm{sign}(0) = 0`, as in the paper (DeepSpeed's moves a parameter whose gradient and
    momentum are zero). Paper: Chen et al., "Symbolic Discovery of Optimization Algorithms"
    (arXiv:2302.06675).

    All arithmetic is in float32, in one pass; every instruction set gives the same bits, and so does plain
    torch where there is no compiler.

    Args:
        model_params: parameters on the host, parameter groups or named parameters; float32, bfloat16 or
            float16, gradients too.
        lr: learning rate.
        betas: weight of the momentum in the direction, and its decay; each from 0 to below 1.
        weight_decay: decoupled.
        fp32_optimizer_states: state is float32; ``False``: of each parameter's dtype.
        maximize: go up the gradient.
        state_dtype: of the state, in place of ``fp32_optimizer_states``.
        master_weights: keep a float32 copy of each 16-bit parameter in the state, update that, and write the
            parameter from it in the same pass.

    Raises:
        InvalidOptimizerArgumentError: a setting that it cannot have.
        UnsupportedParameterError: a parameter of another dtype, or not on the host.
    """

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
        CPULionBuilder().load()
        if state_dtype is None and fp32_optimizer_states:
            state_dtype = torch.float32
        super().__init__(model_params, lr, betas, weight_decay, maximize, state_dtype, master_weights)


class FusedLion(FusedOptimizer, _Lion):
    """:class:`CPULion` for parameters on any device: one call, and on CUDA one launch, for a whole group.

    On the host it is CPULion; on CUDA a kernel of this package; on other devices plain torch. The update
    rule, its paper and the arguments are those of :class:`CPULion`; as in DeepSpeed's, state has the
    parameter's dtype unless ``state_dtype`` says otherwise.

    Args:
        params: parameters, parameter groups or named parameters; float32, bfloat16 or float16.
        lr: learning rate.
        betas: weight of the momentum in the direction, and its decay; each from 0 to below 1.
        weight_decay: decoupled.
        set_grad_none: what :meth:`zero_grad` does unless told.
        maximize: go up the gradient.
        state_dtype: of the state; ``None``: each parameter's.
        master_weights: keep a float32 copy of each 16-bit parameter; see :class:`CPULion`.

    Raises:
        InvalidOptimizerArgumentError: a setting that it cannot have.
        UnsupportedParameterError: a parameter of another dtype.
    """

    builders: ClassVar[Mapping[str, type[OpBuilder]]] = {
        "cpu": FusedLionCPUBuilder,
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
        super().__init__(params, lr, betas, weight_decay, maximize, state_dtype, master_weights)
