"""DeepSpeed's functions for the optimizers: what ``load()`` of each optimizer's builder returns.

Signatures are those of DeepSpeed 0.19's extensions, so that its ``DeepSpeedCPUAdam``, ``FusedAdam`` and so on
run on this module.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from acclimate.errors import InvalidOptimizerArgumentError
from acclimate.ops.optimizers import adagrad, adam, lion
from acclimate.ops.optimizers import lamb as lamb_op
from acclimate.ops.simd import chosen_isa

_logger = logging.getLogger("acclimate")


class Registered:
    """The optimizers of one kind.

    Args:
        kind: its name, as in ``create_adam`` without capitals.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._settings: dict[int, Any] = {}

    def create(self, number: int, kept: Any, should_log: bool, text: str) -> int:
        """Registers an optimizer with the values that its updates need. Returns 0."""
        self._settings[number] = kept
        if should_log:
            _logger.info("%s optimizer %d: %s.", self._kind, number, text)
        return 0

    def destroy(self, optimizer_id: int) -> int:
        """Removes a registration, if there is one. Returns 0."""
        self._settings.pop(optimizer_id, None)
        return 0

    def find(self, number: int) -> Any:
        """Returns the values that were stored for an optimizer.

        Raises:
            InvalidOptimizerArgumentError: no optimizer has that number.
        """
        if number not in self._settings:
            raise InvalidOptimizerArgumentError(
                f"There is no {self._kind} optimizer number {number}. "
                f"Call create_{self._kind.lower()}({number}) first."
            )
        return self._settings[number]


def _update(
    op: Any, step: int, tensors: Sequence[Tensor], outputs: Sequence[Tensor] = (), **settings: Any
) -> int:
    """Runs update number ``step`` of one parameter, whose gradient and states follow it. Returns 0."""
    lists = [[tensor] for tensor in (*tensors, torch.tensor(float(step - 1)))]
    op(*lists, list(outputs), isa=chosen_isa(), **settings)
    torch.autograd.graph.increment_version((tensors[0], *outputs))
    return 0


def _update_group(op: Any, step: int, tensor_lists: Sequence[Sequence[Tensor]], **settings: Any) -> None:
    """Runs update number ``step`` of a group: gradients, parameters and states."""
    grads, params, *states = (list(tensors) for tensors in tensor_lists)
    steps = list(torch.full((len(params),), float(step - 1)).unbind())
    op(params, grads, *states, steps, [], isa=chosen_isa(), **settings)
    torch.autograd.graph.increment_version(params)


# -- Adam -----------------------------------------------------------------------------------------

_adams = Registered("Adam")


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
    return _adams.create(optimizer_id, adamw_mode, should_log, text)


destroy_adam = _adams.destroy


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
    """Updates one parameter and its state in place. Also DeepSpeed's ``adam_update_copy``. Returns 0.

    ``step`` is the number of this update, from 1; :func:`create_adam` decided the kind of weight decay. The
    parameter, its gradient and its state can each be float32, bfloat16 or float16. ``device_params``, of any
    dtype and device, also receives the new parameter; on the host in the same pass over memory.

    Raises:
        InvalidOptimizerArgumentError: no optimizer has that number.
    """
    outputs = [device_params] if device_params is not None and device_params.device.type == "cpu" else []
    _update(
        adam.define(), step, (params, grads, exp_avg, exp_avg_sq), outputs, lr=lr, beta1=beta1, beta2=beta2,
        eps=epsilon, weight_decay=weight_decay, decoupled=_adams.find(optimizer_id),
        bias_correction=bool(bias_correction),
    )  # fmt: skip
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
    if weight_decay and not _adams.find(optimizer_id):
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
    """Updates a group: gradients, parameters, first and second moments. The settings are ``adam_update``'s.

    ``mode`` is 1 for decoupled weight decay, 0 for L2. ``chunk_size`` and ``noop_flag`` have no effect: the
    work is divided evenly for any sizes, and DeepSpeed ignores the flag too.
    """
    _update_group(
        adam.define(), step, tensor_lists, lr=lr, beta1=beta1, beta2=beta2, eps=epsilon,
        weight_decay=weight_decay, decoupled=mode == 1, bias_correction=bias_correction == 1,
    )  # fmt: skip


# -- Lion -----------------------------------------------------------------------------------------

_lions = Registered("Lion")


def create_lion(
    optimizer_id: int,
    alpha: float = 1e-3,
    betta1: float = 0.9,
    betta2: float = 0.999,
    weight_decay: float = 0.0,
    should_log: bool = False,
) -> int:
    """As :func:`create_adam`; nothing is kept but the number."""
    text = f"lr {alpha:g}, betas ({betta1:g}, {betta2:g}), weight decay {weight_decay:g}"
    return _lions.create(optimizer_id, None, should_log, text)


destroy_lion = _lions.destroy


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

    The arguments are those of :func:`adam_update`; ``step`` has no effect, as Lion has no bias
    correction, and ``beta1`` is the momentum's weight in the direction.

    Raises:
        InvalidOptimizerArgumentError: no optimizer has that number.
    """
    _lions.find(optimizer_id)
    tensors = params, grads, exp_avg
    return _update(lion.define(), step, tensors, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay)


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
    """As :func:`multi_tensor_adam`, for gradients, parameters and momenta."""
    _update_group(
        lion.define(), step, tensor_lists, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay
    )


# -- Adagrad --------------------------------------------------------------------------------------

_adagrads = Registered("Adagrad")


def create_adagrad(
    optimizer_id: int,
    alpha: float = 1e-2,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    should_log: bool = False,
) -> int:
    """As :func:`create_adam`; nothing is kept but the number."""
    text = f"lr {alpha:g}, eps {eps:g}, weight decay {weight_decay:g}"
    return _adagrads.create(optimizer_id, None, should_log, text)


destroy_adagrad = _adagrads.destroy


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

    The arguments are those of :func:`adam_update`; ``step`` has no effect, since
    the learning rate does not decay, and ``exp_avg_sq`` is the sum of squared gradients.

    Raises:
        InvalidOptimizerArgumentError: no optimizer has that number.
    """
    _adagrads.find(optimizer_id)
    return _update(
        adagrad.define(), step, (params, grads, exp_avg_sq), lr=lr, lr_decay=0.0, weight_decay=weight_decay,
        eps=epsilon,
    )  # fmt: skip


# -- LAMB ---------------------------------------------------------------------------------------------


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

    Args, besides those that it shares with :func:`adam_update`:
        p: the parameter.
        p_copy: also receives the new parameter, unless it is empty.
        m: first moment.
        v: second moment.
        g: gradient.
        max_coeff: the largest trust ratio.
        min_coeff: the smallest trust ratio.
        eps: added to the denominator.
        grad_scale: divides the gradient.
        mode: 0 adds ``eps`` to the second moment before taking the root, 1 to the root.
        bias_correction: 1 to correct the learning rate for moments that started at zero.

    Returns:
        The trust ratio, float32, shape (1,).
    """
    ratio = torch.ones(1, dtype=torch.float32, device=p.device)
    done = torch.tensor(float(step - 1))
    lamb_op.define()(
        [p], [g], [m], [v], [done], [p_copy] if p_copy.numel() else [], ratio, lr=lr, beta1=beta1,
        beta2=beta2, eps=eps, weight_decay=decay, min_ratio=min_coeff, max_ratio=max_coeff,
        bias_correction=bias_correction == 1, corrects_rate=True, eps_inside_sqrt=mode == 0, grad_scale=1.0
        / grad_scale,
    )  # fmt: skip
    torch.autograd.graph.increment_version(p)
    return ratio
