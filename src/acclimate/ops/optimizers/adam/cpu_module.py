"""DeepSpeed's functions for Adam on the host: what ``CPUAdamBuilder().load()`` returns.

Signatures are those of DeepSpeed 0.19's ``cpu_adam`` extension, so that its ``DeepSpeedCPUAdam`` runs on
this module.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acclimate.errors import InvalidOptimizerArgumentError
from acclimate.ops.optimizers.adam.plain import define
from acclimate.ops.optimizers.registered import Registered
from acclimate.ops.simd import chosen_isa

# With whether weight decay is decoupled.
_optimizers = Registered("Adam")


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
    """Registers an optimizer under the caller's number ``optimizer_id``. Returns 0.

    Only ``adamw_mode`` is kept: ``True`` for decoupled weight decay, ``False`` for L2. Each update gets the
    other settings again. With ``should_log`` they are logged as information.
    """
    form = "AdamW" if adamw_mode else "L2"
    text = f"lr {alpha:g}, betas ({betta1:g}, {betta2:g}), weight decay {weight_decay:g}, {form}"
    return _optimizers.create(optimizer_id, adamw_mode, should_log, text)


destroy_adam = _optimizers.destroy


@torch.no_grad()
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
    device_params: Tensor | None = None,
) -> int:
    """Updates one parameter and its state in place. Also DeepSpeed's ``adam_update_copy``.

    Args:
        optimizer_id: as given to :func:`create_adam`.
        step: the number of this update, from 1.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: added to the denominator.
        weight_decay: decoupled or L2, as given to :func:`create_adam`.
        bias_correction: whether moments are corrected for starting at zero.
        params: the parameter; it, its gradient and its state can each be float32, bfloat16 or float16.
        grads: its gradient.
        exp_avg: first moment.
        exp_avg_sq: second moment.
        device_params: also receives the new parameter; of any dtype and device. A tensor on the host is
            written in the same pass over memory.

    Returns:
        0.

    Raises:
        InvalidOptimizerArgumentError: no optimizer has that number.
    """
    done = torch.tensor(float(step - 1))
    outputs = [device_params] if device_params is not None and device_params.device.type == "cpu" else []
    define()([params], [grads], [exp_avg], [exp_avg_sq], [done], outputs, lr=lr, beta1=beta1, beta2=beta2,
             eps=epsilon, weight_decay=weight_decay, decoupled=_optimizers.find(optimizer_id),
             bias_correction=bool(bias_correction), isa=chosen_isa())  # fmt: skip
    torch.autograd.graph.increment_version((params, *outputs))
    if device_params is not None and not outputs:
        device_params.copy_(params.view_as(device_params), non_blocking=True)
    return 0


adam_update_copy = adam_update


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
    """Reverses update number ``step``, made with these arguments, up to rounding. Returns 0.

    Raises:
        InvalidOptimizerArgumentError: no optimizer has that number, or its weight decay is L2, which cannot
            be separated from the gradient afterwards.
    """
    if weight_decay and not _optimizers.find(optimizer_id):
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
