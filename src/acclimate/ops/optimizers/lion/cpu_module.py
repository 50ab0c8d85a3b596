"""DeepSpeed's functions for Lion on the host: what ``CPULionBuilder().load()`` returns.

Signatures are those of DeepSpeed 0.19's ``cpu_lion`` extension, so that its ``DeepSpeedCPULion`` runs on
this module.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acclimate.ops.optimizers.lion.plain import define
from acclimate.ops.optimizers.registered import Registered
from acclimate.ops.simd import chosen_isa

_optimizers = Registered("Lion")


def create_lion(
    optimizer_id: int,
    alpha: float = 1e-3,
    betta1: float = 0.9,
    betta2: float = 0.999,
    weight_decay: float = 0.0,
    should_log: bool = False,
) -> int:
    """Registers an optimizer under the caller's number ``optimizer_id``. Returns 0.

    The settings are not kept, since each update gets them again. With ``should_log`` they are logged as
    information.
    """
    text = f"lr {alpha:g}, betas ({betta1:g}, {betta2:g}), weight decay {weight_decay:g}"
    return _optimizers.create(optimizer_id, None, should_log, text)


destroy_lion = _optimizers.destroy


@torch.no_grad()
def lion_update(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
) -> int:
    """Updates one parameter and its state in place. Returns 0.

    The arguments are those of :func:`~acclimate.ops.optimizers.adam.cpu_module.adam_update`; ``step`` has no
    effect, since Lion has no bias correction, and ``beta1`` is the momentum's weight in the direction.

    Raises:
        InvalidOptimizerArgumentError: no optimizer has that number.
    """
    _optimizers.find(optimizer_id)
    done = torch.tensor(float(step - 1))
    define()([params], [grads], [exp_avg], [done], [], lr=lr, beta1=beta1, beta2=beta2,
             weight_decay=weight_decay, isa=chosen_isa())  # fmt: skip
    torch.autograd.graph.increment_version(params)
    return 0
