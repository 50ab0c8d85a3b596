"""CPUAdam and FusedAdam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.optimizers.adam.plain import STATE_NAMES, define
from acclimate.ops.optimizers.base import FusedOptimizer, GroupOptimizer, Parameters
from acclimate.ops.optimizers.builders import CPUAdamBuilder, FusedAdamBuilder, FusedAdamCPUBuilder


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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                    "bias_correction": bias_correction, "amsgrad": amsgrad, "maximize": maximize,
                    "decoupled_weight_decay": adam_w_mode}  # fmt: skip
        super().__init__(params, defaults, state_dtype=state_dtype, master_weights=master_weights)
