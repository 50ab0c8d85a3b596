"""DeepSpeed's functions for Adam on the host: what ``CPUAdamBuilder().load()`` returns.

Signatures are those of DeepSpeed 0.19's ``cpu_adam`` extension, so that its ``DeepSpeedCPUAdam`` runs on
this module.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from acclimate.errors import InvalidOptimizerArgumentError
from acclimate.ops.optimizers.adam.schema import define
from acclimate.ops.optimizers.simd import chosen_isa

_logger = logging.getLogger("acclimate")


@dataclass(frozen=True)
class _Adam:
    decoupled: bool


_optimizers: dict[int, _Adam] = {}


def create_adam(
    optimizer_id: int,
    alpha: float = 1e-3,
    betta1: float = 0.9,
    betta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adamw_mode: bool = True,
    should_log: bool = False,
) -> int:
    """Makes an optimizer known by a number; each update gives its settings, so only the mode is kept.

    Args:
        optimizer_id: its number, chosen by the caller.
        alpha: not used; :func:`adam_update` has the learning rate.
        betta1: not used, likewise.
        betta2: not used, likewise.
        eps: not used, likewise.
        weight_decay: not used, likewise.
        adamw_mode: decoupled weight decay; otherwise it joins the gradient (L2).
        should_log: logs, as information, that the optimizer was made.

    Returns:
        0.
    """
    _optimizers[optimizer_id] = _Adam(adamw_mode)
    if should_log:
        _logger.info(
            "Adam optimizer %d: lr %g, betas (%g, %g), weight decay %g, %s.",
            optimizer_id, alpha, betta1, betta2, weight_decay, "AdamW" if adamw_mode else "L2",
        )  # fmt: skip
    return 0


def destroy_adam(optimizer_id: int) -> int:
    """Forgets an optimizer. Returns 0."""
    _optimizers.pop(optimizer_id, None)
    return 0


def adam_update(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    bias_correction: bool,
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
) -> int:
    """Updates one parameter and its state in place.

    Args:
        optimizer_id: as given to :func:`create_adam`.
        step: the number of this update, from 1.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: added to the denominator.
        weight_decay: decoupled or L2, as the optimizer was made.
        bias_correction: whether moments are corrected for starting at zero.
        params: the parameter; float32, bfloat16 or float16, as all tensors here, in any combination.
        grads: its gradient.
        exp_avg: first moment.
        exp_avg_sq: second moment.

    Returns:
        0.

    Raises:
        InvalidOptimizerArgumentError: no optimizer has that number.
    """
    _update(optimizer_id, step, lr, beta1, beta2, epsilon, weight_decay, bias_correction, params, grads,
            exp_avg, exp_avg_sq, [])  # fmt: skip
    return 0


def adam_update_copy(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    bias_correction: bool,
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    device_params: Tensor,
) -> int:
    """:func:`adam_update` that also writes the new parameter to another tensor, of any dtype and device.

    On the host it is written in the same pass over memory.
    """
    on_host = device_params.device.type == "cpu"
    _update(optimizer_id, step, lr, beta1, beta2, epsilon, weight_decay, bias_correction, params, grads,
            exp_avg, exp_avg_sq, [device_params] if on_host else [])  # fmt: skip
    if not on_host:
        with torch.no_grad():
            device_params.copy_(params.view_as(device_params), non_blocking=True)
    return 0


@torch.no_grad()
def _update(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    bias_correction: bool,
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    outputs: list[Tensor],
) -> None:
    done = torch.tensor(float(step - 1))
    define()([params], [grads], [exp_avg], [exp_avg_sq], [done], outputs, lr=lr, beta1=beta1, beta2=beta2,
             eps=epsilon, weight_decay=weight_decay, decoupled=_optimizer(optimizer_id).decoupled,
             bias_correction=bool(bias_correction), isa=chosen_isa())  # fmt: skip
    torch.autograd.graph.increment_version((params, *outputs))


@torch.no_grad()
def adam_rollback(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    bias_correction: bool,
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
) -> int:
    """Takes back the update number ``step`` that was made with these arguments, up to rounding.

    Returns:
        0.

    Raises:
        InvalidOptimizerArgumentError: no optimizer has that number, or it does not decouple weight decay:
            what joined the gradient cannot be told apart afterwards.
    """
    if weight_decay and not _optimizer(optimizer_id).decoupled:
        raise InvalidOptimizerArgumentError("adam_rollback needs decoupled weight decay (adamw_mode=True).")
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = 1.0 - beta2**step if bias_correction else 1.0
    denominator = (exp_avg_sq.float() / correction2).sqrt() + epsilon
    moved = params.float() + (lr / correction1) * exp_avg.float() / denominator
    params.copy_(moved / (1.0 - lr * weight_decay))
    gradient = grads.float()
    exp_avg.copy_((exp_avg.float() - (1.0 - beta1) * gradient) / beta1)
    exp_avg_sq.copy_((exp_avg_sq.float() - (1.0 - beta2) * gradient * gradient) / beta2)
    return 0


def _optimizer(optimizer_id: int) -> _Adam:
    if optimizer_id not in _optimizers:
        raise InvalidOptimizerArgumentError(
            f"There is no Adam optimizer number {optimizer_id}. Call create_adam({optimizer_id}, …) first."
        )
    return _optimizers[optimizer_id]
