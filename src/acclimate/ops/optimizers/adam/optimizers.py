"""CPUAdam and FusedAdam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.optimizers.adam.builder import CPUAdamBuilder, FusedAdamBuilder, FusedAdamCPUBuilder
from acclimate.ops.optimizers.adam.schema import define
from acclimate.ops.optimizers.base import FusedOptimizer, GroupOptimizer, Parameters
from acclimate.ops.optimizers.checks import number


class _Adam(GroupOptimizer):
    """What CPUAdam and FusedAdam share."""

    define_op = staticmethod(define)
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor,
        bias_correction: bool,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        amsgrad: bool,
        decoupled: bool,
        maximize: bool,
        state_dtype: torch.dtype | None,
        master_weights: bool,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "amsgrad": amsgrad,
            "maximize": maximize,
            # torch.optim.AdamW's name for it, so that each loads the other's state.
            "decoupled_weight_decay": decoupled,
        }
        super().__init__(params, defaults, state_dtype=state_dtype, master_weights=master_weights)

    def op_settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group's settings under the names of the op's arguments."""
        beta1, beta2 = group["betas"]
        return {
            "lr": number(group["lr"]),
            "beta1": number(beta1),
            "beta2": number(beta2),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "decoupled": group["decoupled_weight_decay"],
            "bias_correction": group["bias_correction"],
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

    All arithmetic is in float32; each value is read, converted, computed with, rounded once and written in
    one pass. Every instruction set gives the same bits, and so does plain torch where there is no compiler.
    The arguments are DeepSpeedCPUAdam's, and then some; ``state_dict()`` goes to and from
    ``torch.optim.AdamW``.

    Args:
        model_params: parameters on the host, parameter groups or named parameters; float32, bfloat16 or
            float16, gradients too.
        lr: learning rate.
        bias_correction: divide the moments by :math:`1 - \beta^t`.
        betas: decay of the moments, each from 0 to below 1.
        eps: added to the denominator.
        weight_decay: see ``adamw_mode``.
        amsgrad: only ``False``.
        adamw_mode: decoupled weight decay; ``False``: L2.
        fp32_optimizer_states: state is float32; ``False``: of each parameter's dtype.
        maximize: go up the gradient.
        state_dtype: of the state, in place of ``fp32_optimizer_states``.
        master_weights: keep a float32 copy of each 16-bit parameter in the state, update that, and write the
            parameter from it in the same pass.

    Raises:
        InvalidOptimizerArgumentError: a setting that it cannot have.
        UnsupportedParameterError: a parameter of another dtype, or not on the host.
    """

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
        CPUAdamBuilder().load()
        if state_dtype is None and fp32_optimizer_states:
            state_dtype = torch.float32
        super().__init__(model_params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode,
                         maximize, state_dtype, master_weights)  # fmt: skip


class FusedAdam(FusedOptimizer, _Adam):
    """:class:`CPUAdam` for parameters on any device: one call, and on CUDA one launch, for a whole group.

    On the host it is CPUAdam; on CUDA a kernel of this package; on other devices torch's own fused Adam
    where that runs, and plain torch where it does not. The update rule, its papers and the arguments are
    those of :class:`CPUAdam`; as in DeepSpeed's and torch's, state has the parameter's dtype unless
    ``state_dtype`` says otherwise.

    Args:
        params: parameters, parameter groups or named parameters; float32, bfloat16 or float16.
        lr: learning rate.
        bias_correction: divide the moments by one minus beta to the step.
        betas: decay of the moments, each from 0 to below 1.
        eps: added to the denominator.
        adam_w_mode: decoupled weight decay; ``False``: L2.
        weight_decay: see ``adam_w_mode``.
        amsgrad: only ``False``.
        set_grad_none: what :meth:`zero_grad` does unless told.
        maximize: go up the gradient.
        state_dtype: of the state; ``None``: each parameter's.
        master_weights: keep a float32 copy of each 16-bit parameter; see :class:`CPUAdam`.

    Raises:
        InvalidOptimizerArgumentError: a setting that it cannot have.
        UnsupportedParameterError: a parameter of another dtype.
    """

    builders: ClassVar[Mapping[str, type[OpBuilder]]] = {
        "cpu": FusedAdamCPUBuilder,
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
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode,
                         maximize, state_dtype, master_weights)  # fmt: skip
