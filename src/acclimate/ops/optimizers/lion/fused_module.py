"""DeepSpeed's function for Lion on a group of tensors: what ``FusedLionBuilder().load()`` returns.

Its signature is that of DeepSpeed 0.19's ``fused_lion`` extension, so that its ``FusedLion`` runs on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from acclimate.ops.optimizers.lion.plain import define
from acclimate.ops.simd import chosen_isa


@torch.no_grad()
def multi_tensor_lion(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    step: int,
    weight_decay: float,
) -> None:
    """Updates a group of parameters and their state in place; the settings are ``lion_update``'s.

    Args:
        chunk_size: not used: the work is divided evenly for any sizes.
        noop_flag: not used, as in DeepSpeed.
        tensor_lists: gradients, parameters, momenta.
    """
    grads, params, exp_avgs = (list(tensors) for tensors in tensor_lists)
    steps = list(torch.full((len(params),), float(step - 1)).unbind())
    define()(params, grads, exp_avgs, steps, [], lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay,
             isa=chosen_isa())  # fmt: skip
    torch.autograd.graph.increment_version(params)
