"""DeepSpeed's function for Adam on a group of tensors: what ``FusedAdamBuilder().load()`` returns.

Its signature is that of DeepSpeed 0.19's ``fused_adam`` extension, so that its ``FusedAdam`` runs on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from acclimate.ops.optimizers.adam.plain import define
from acclimate.ops.simd import chosen_isa


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Updates a group of parameters and their state in place; the settings are ``adam_update``'s.

    Args:
        chunk_size: not used: the work is divided evenly for any sizes.
        noop_flag: not used, as in DeepSpeed.
        tensor_lists: gradients, parameters, first moments, second moments.
        mode: 1 for decoupled weight decay, 0 for L2.
    """
    grads, params, exp_avgs, exp_avg_sqs = (list(tensors) for tensors in tensor_lists)
    steps = list(torch.full((len(params),), float(step - 1)).unbind())
    define()(params, grads, exp_avgs, exp_avg_sqs, steps, [], lr=lr, beta1=beta1, beta2=beta2, eps=epsilon,
             weight_decay=weight_decay, decoupled=mode == 1, bias_correction=bias_correction == 1,
             isa=chosen_isa())  # fmt: skip
    torch.autograd.graph.increment_version(params)
