"""The op ``acclimate::lion_``: its schema, and Lion in plain torch for devices without a native kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from acclimate.ops.optimizers.plain_group import update_group
from acclimate.ops.registry import define_in_place

# csrc/lion_call.h reads the arguments in this order.
SCHEMA = (
    "lion_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] steps, "
    "Tensor(d!)[] outputs, *, float lr, float beta1, float beta2, float weight_decay, bool maximize=False, "
    "float grad_scale=1.0, int isa=0) -> ()"
)
STATE_NAMES = ("exp_avg",)
"""The names of the states, in the order of the op's arguments."""


def define() -> Any:
    """Defines the op, once per process, and returns it."""
    return define_in_place(SCHEMA, lion_)


def lion_(*lists: list[Tensor], **settings: Any) -> None:
    """Runs one step of Lion on each parameter; see :class:`acclimate.ops.CPULion`.

    It rounds in the same places as csrc/lion_rule.h, so results have the same bits.
    """
    update_group(_update, lists, STATE_NAMES, **settings)


def _update(
    step: float, p: Tensor, g: Tensor, m: Tensor,
    *, lr: float, beta1: float, beta2: float, weight_decay: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    direction = (m * beta1 + g * (1.0 - beta1)).sign()
    return p * (1.0 - lr * weight_decay) - direction * lr, m * beta2 + g * (1.0 - beta2)
