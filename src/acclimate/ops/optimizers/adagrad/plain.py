"""The op ``acclimate::adagrad_``: its schema, and Adagrad in plain torch where no native kernel is loaded."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from acclimate.ops.optimizers.plain_group import update_group
from acclimate.ops.optimizers.rounding import square_root
from acclimate.ops.registry import define_in_place

# csrc/adagrad_call.h reads the arguments in this order.
SCHEMA = (
    "adagrad_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] sums, Tensor(c!)[] steps, "
    "Tensor(d!)[] outputs, *, float lr, float lr_decay, float weight_decay, float eps, bool maximize=False, "
    "float grad_scale=1.0, int isa=0) -> ()"
)
STATE_NAMES = ("sum",)
"""The names of the states, in the order of the op's arguments."""


def define() -> Any:
    """Defines the op, once per process, and returns it."""
    return define_in_place(SCHEMA, adagrad_)


def adagrad_(*lists: list[Tensor], **settings: Any) -> None:
    """Runs one step of Adagrad on each parameter; see :class:`acclimate.ops.CPUAdagrad`.

    It rounds in the same places as csrc/adagrad_rule.h, so results have the same bits.
    """
    update_group(_update, lists, STATE_NAMES, **settings)


def _update(
    step: float, p: Tensor, g: Tensor, total: Tensor,
    *, lr: float, lr_decay: float, weight_decay: float, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    negative_lr = -lr / (1.0 + (step - 1.0) * lr_decay)
    if weight_decay != 0.0:
        g = g + p * weight_decay
    total = total + g * g
    return p + (g * negative_lr) / (square_root(total) + eps), total
