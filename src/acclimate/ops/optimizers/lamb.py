"""LAMB: the op ``acclimate::lamb_``, and FusedLamb for parameters on any device.

The op has a version in plain torch for devices without a native kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from acclimate.errors import InvalidOptimizerArgumentError
from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.optimizers.base import GroupOptimizer, GroupTensors, Parameters, update_group
from acclimate.ops.optimizers.builders import FusedLambBuilder
from acclimate.ops.registry import define_in_place

# csrc/lamb.cu reads the arguments in this order.
SCHEMA = (
    "lamb_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] steps, Tensor(e!)[] outputs, Tensor(f!) ratios, *, float lr, float beta1, float beta2, "
    "float eps, float weight_decay, float min_ratio, float max_ratio, bool bias_correction, "
    "bool corrects_rate=False, bool eps_inside_sqrt=False, bool maximize=False, float grad_scale=1.0) -> ()"
)
STATE_NAMES = ("exp_avg", "exp_avg_sq")
"""The names of the states, in the order of the op's arguments."""


def define() -> Any:
    """Defines the op, once per process, and returns it."""
    return define_in_place(SCHEMA, lamb_)


def lamb_(*arguments: Any, **settings: Any) -> None:
    """Runs one step of LAMB on each parameter and writes the trust ratios to the last argument (float32).

    ``corrects_rate`` applies the bias correction to the learning rate instead of the moments, as DeepSpeed
    does. :class:`acclimate.ops.FusedLamb` and :class:`GroupTensors` describe the other arguments.
    """
    *lists, ratios = arguments
    places = iter(ratios)

    def update(*given: Any, **settings: Any) -> Sequence[Tensor]:
        ratio, *new = _update(*given, **settings)
        next(places).copy_(ratio)
        return new

    update_group(update, lists, STATE_NAMES, **settings)


def _update(
    step: float, p: Tensor, g: Tensor, m: Tensor, v: Tensor,
    *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, min_ratio: float,
    max_ratio: float, bias_correction: bool, corrects_rate: bool = False, eps_inside_sqrt: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Returns the trust ratio, the new parameter and the new moments."""
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = 1.0 - beta2**step if bias_correction else 1.0
    if corrects_rate:
        lr, correction1, correction2 = lr * correction2**0.5 / correction1, 1.0, 1.0
    m = m * beta1 + g * (1.0 - beta1)
    v = v * beta2 + (g * (1.0 - beta2)) * g
    corrected = v / correction2
    denominator = (corrected + eps).sqrt() if eps_inside_sqrt else corrected.sqrt() + eps
    update = (m / correction1) / denominator + p * weight_decay
    ratio = _trust_ratio(p.norm(), update.norm(), min_ratio, max_ratio)
    return ratio, p - update * (ratio * lr), m, v


def _trust_ratio(weight_norm: Tensor, update_norm: Tensor, least: float, greatest: float) -> Tensor:
    """Returns the ratio of the weight's norm to the update's, within bounds; 1 if either is zero."""
    ratio = (weight_norm / update_norm).clamp(least, greatest)
    return torch.where((weight_norm == 0) | (update_norm == 0), torch.ones_like(ratio), ratio)


class FusedLamb(GroupOptimizer):
    r"""LAMB: Adam with each tensor's step in proportion to its norm, for very large batches.

    For gradient :math:`g_t`, learning rate :math:`\gamma` and weight decay :math:`\lambda`, for each
    parameter tensor:

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \quad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        u_t &= \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon} + \lambda \theta_{t-1} \\
        \theta_t &= \theta_{t-1} - \gamma \,
            \mathrm{clip}\left(\frac{\lVert \theta_{t-1} \rVert}{\lVert u_t \rVert}\right) u_t

    where the ratio is 1 if either norm is 0. Paper: You et al., "Large Batch Optimization for Deep Learning:
    Training BERT in 76 minutes" (arXiv:1904.00962).

    On CUDA three launches update a whole group; other devices run plain torch. Arithmetic is in float32.

    Args, besides those that it shares with :class:`FusedAdam`:
        eps_inside_sqrt: adds ``eps`` to the second moment before taking the root instead.
        weight_decay: added to the update, in proportion to the parameter.
        max_grad_norm: scales the gradients of a group down to this norm; 0: no limit.
        max_coeff: the largest trust ratio.
        min_coeff: the smallest trust ratio.

    Raises:
        InvalidOptimizerArgumentError: a setting is out of range or of the wrong kind.
        UnsupportedParameterError: a parameter has another dtype, or is sharded over ranks.
    """

    define_op = staticmethod(define)
    state_names: ClassVar[tuple[str, ...]] = STATE_NAMES
    op_arguments: ClassVar[Mapping[str, str]] = {
        "lr": "lr",
        "eps": "eps",
        "weight_decay": "weight_decay",
        "min_ratio": "min_coeff",
        "max_ratio": "max_coeff",
        "bias_correction": "bias_correction",
        "maximize": "maximize",
    }
    builders: ClassVar[Mapping[str, type[OpBuilder]]] = {"cuda": FusedLambBuilder}
    needs_whole_parameters: ClassVar[bool] = True
    options: ClassVar[tuple[str, ...]] = ("eps_inside_sqrt", "_ratios")

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            raise InvalidOptimizerArgumentError("FusedLamb has no AMSGrad variant. Do not pass amsgrad.")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_grad_norm": max_grad_norm,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "maximize": maximize,
        }
        self.eps_inside_sqrt = eps_inside_sqrt
        self._ratios: list[Tensor] = []
        super().__init__(params, defaults, state_dtype=state_dtype, master_weights=master_weights)

    def get_lamb_coeffs(self) -> list[float]:
        """Returns the trust ratios of the last step, in the order of the parameters with a gradient."""
        return [ratio for ratios in self._ratios for ratio in ratios.tolist()]

    def step(self, *arguments: Any, **options: Any) -> Any:
        """Updates all parameters that have a gradient; see :meth:`GroupOptimizer.step`."""
        self._ratios.clear()
        return super().step(*arguments, **options)

    def update(self, group: Mapping[str, Any], tensors: GroupTensors, grad_scale: float) -> None:
        """Updates the tensors of one group, in one call for each device."""
        limit = group["max_grad_norm"]
        if limit > 0:
            norms = torch._foreach_norm(tensors.grads)
            norm = torch.stack([n.float().to(norms[0].device) for n in norms]).norm().item() * grad_scale
            grad_scale /= max(1.0, norm / limit)
        for part in tensors.by_device():
            ratios = torch.ones(len(part.params), dtype=torch.float32, device=part.params[0].device)
            self._op(
                *part.lists(),
                ratios,
                **self.op_settings(group),
                eps_inside_sqrt=self.eps_inside_sqrt,
                grad_scale=grad_scale,
            )
            self._ratios.append(ratios)
