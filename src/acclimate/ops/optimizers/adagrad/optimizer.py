"""CPUAdagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from acclimate.errors import InvalidOptimizerArgumentError
from acclimate.ops.optimizers.adagrad.builder import CPUAdagradBuilder
from acclimate.ops.optimizers.adagrad.schema import define
from acclimate.ops.optimizers.base import GroupOptimizer, Parameters
from acclimate.ops.optimizers.checks import number


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

    All arithmetic is in float32, in one pass; every instruction set gives the same bits, and so does plain
    torch where there is no compiler. ``state_dict()`` goes to and from ``torch.optim.Adagrad``.

    Args:
        model_params: parameters on the host, parameter groups or named parameters; float32, bfloat16 or
            float16, gradients too.
        lr: learning rate.
        eps: added to the denominator.
        weight_decay: L2.
        amsgrad: only ``False``; DeepSpeed's signature has it.
        fp32_optimizer_states: state is float32; ``False``: of each parameter's dtype.
        lr_decay: decay of the learning rate.
        initial_accumulator_value: what the sum of squares starts at.
        maximize: go up the gradient.
        state_dtype: of the state, in place of ``fp32_optimizer_states``.
        master_weights: keep a float32 copy of each 16-bit parameter in the state, update that, and write the
            parameter from it in the same pass.

    Raises:
        InvalidOptimizerArgumentError: a setting that it cannot have.
        UnsupportedParameterError: a parameter of another dtype, or not on the host.
    """

    define_op = staticmethod(define)
    state_names: ClassVar[tuple[str, ...]] = ("sum",)
    elsewhere: ClassVar[str | None] = "torch.optim.Adagrad"

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
            raise InvalidOptimizerArgumentError("Adagrad has no AMSGrad variant. Leave amsgrad out.")
        CPUAdagradBuilder().load()
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

    def initial_state(self, name: str, group: Mapping[str, Any]) -> float:
        """The sum of squares starts at ``initial_accumulator_value``."""
        return float(group["initial_accumulator_value"])

    def op_settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group's settings under the names of the op's arguments."""
        settings = {name: group[name] for name in ("lr_decay", "weight_decay", "eps")}
        return {"lr": number(group["lr"]), **settings}
