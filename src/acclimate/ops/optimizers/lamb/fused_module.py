"""DeepSpeed's function for LAMB: what ``FusedLambBuilder().load()`` returns.

Its signature is that of DeepSpeed 0.19's ``fused_lamb`` extension, so that its ``FusedLamb`` runs on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acclimate.ops.optimizers.lamb.plain import define


@torch.no_grad()
def lamb(
    p: Tensor,
    p_copy: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    max_coeff: float,
    min_coeff: float,
    eps: float,
    grad_scale: float,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> Tensor:
    """Updates one parameter and its state in place.

    Args:
        p: the parameter.
        p_copy: also receives the new parameter, unless it is empty.
        m: first moment.
        v: second moment.
        g: gradient.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        max_coeff: the largest trust ratio.
        min_coeff: the smallest trust ratio.
        eps: added to the denominator.
        grad_scale: divides the gradient.
        step: the number of this update, from 1.
        mode: 0 adds ``eps`` to the second moment before taking the root, 1 to the root.
        bias_correction: 1 to correct the learning rate for moments that started at zero.
        decay: weight decay.

    Returns:
        The trust ratio, float32, shape (1,).
    """
    ratio = torch.ones(1, dtype=torch.float32, device=p.device)
    done = torch.tensor(float(step - 1))
    define()([p], [g], [m], [v], [done], [p_copy] if p_copy.numel() else [], ratio, lr=lr, beta1=beta1,
             beta2=beta2, eps=eps, weight_decay=decay, min_ratio=min_coeff, max_ratio=max_coeff,
             bias_correction=bias_correction == 1, corrects_rate=True, eps_inside_sqrt=mode == 0,
             grad_scale=1.0 / grad_scale)  # fmt: skip
    torch.autograd.graph.increment_version(p)
    return ratio
