"""DeepSpeed's functions for Adagrad on the host: what ``CPUAdagradBuilder().load()`` returns.

Signatures are those of DeepSpeed 0.19's ``cpu_adagrad`` extension, so that its ``DeepSpeedCPUAdagrad`` runs
on this module. Unlike DeepSpeed's, it does not overwrite the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acclimate.ops.optimizers.adagrad.plain import define
from acclimate.ops.optimizers.registered import Registered
from acclimate.ops.simd import chosen_isa

_optimizers = Registered("Adagrad")


def create_adagrad(
    optimizer_id: int,
    alpha: float = 1e-2,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    should_log: bool = False,
) -> int:
    """Registers an optimizer under the caller's number ``optimizer_id``. Returns 0.

    The settings are not kept, since each update gets them again. With ``should_log`` they are logged as
    information.
    """
    text = f"lr {alpha:g}, eps {eps:g}, weight decay {weight_decay:g}"
    return _optimizers.create(optimizer_id, None, should_log, text)


destroy_adagrad = _optimizers.destroy


@torch.no_grad()
def adagrad_update(
    optimizer_id: int,
    step: int,
    lr: float,
    epsilon: float,
    weight_decay: float,
    params: Tensor,
    grads: Tensor,
    exp_avg_sq: Tensor,
) -> int:
    """Updates one parameter and its state in place. Returns 0.

    The arguments are those of :func:`~acclimate.ops.optimizers.adam.cpu_module.adam_update`; ``step`` has no
    effect, since the learning rate does not decay, and ``exp_avg_sq`` is the sum of squared gradients.

    Raises:
        InvalidOptimizerArgumentError: no optimizer has that number.
    """
    _optimizers.find(optimizer_id)
    done = torch.tensor(float(step - 1))
    define()([params], [grads], [exp_avg_sq], [done], [], lr=lr, lr_decay=0.0, weight_decay=weight_decay,
             eps=epsilon, isa=chosen_isa())  # fmt: skip
    torch.autograd.graph.increment_version(params)
    return 0
