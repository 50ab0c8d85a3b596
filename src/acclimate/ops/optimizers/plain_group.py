"""Ops in plain torch, for devices without a native kernel: a rule for one parameter updates a whole group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from acclimate.ops.optimizers.checks import check_sizes


def rows(lists: Sequence[list[Tensor]], indices: Sequence[int]) -> list[list[Tensor]]:
    """Returns the tensors at these indices of each list that is not empty."""
    return [[tensors[index] for index in indices] if tensors else [] for tensors in lists]


def update_group(
    rule: Callable[..., Sequence[Tensor]],
    lists: Sequence[list[Tensor]],
    state_names: Sequence[str],
    *,
    maximize: bool = False,
    grad_scale: float = 1.0,
    isa: int = 0,
    **settings: Any,
) -> None:
    """Updates each parameter and its state in place.

    Args:
        rule: takes the number of this update, from 1; the parameter, its gradient and its states in float32;
            and the settings. Returns the new parameter and states.
        lists: the tensors, in the order of :meth:`GroupTensors.lists`.
        state_names: the names of the states in messages.
        isa: not used: torch chooses the instructions.
    """
    params, grads, *states, steps, outputs = lists
    named_states = dict(zip(state_names, states, strict=True))
    check_sizes(params, gradient=grads, **named_states, output=outputs)
    scale = -grad_scale if maximize else grad_scale
    for index, step in enumerate(steps):
        step.add_(1)
        changed = [params[index], *(state[index] for state in states)]
        param, *own_states = (tensor.float() for tensor in changed)
        new = rule(step.item(), param, grads[index].float() * scale, *own_states, **settings)
        for tensor, value in zip(changed, new, strict=True):
            tensor.copy_(value)
        if outputs:
            outputs[index].copy_(new[0])


def square_root(x: Tensor) -> Tensor:
    """Returns the float32 square root, correctly rounded on the host.

    On the host torch's own comes from a vector library and can be off by one unit in the last place. The
    float64 root has more than twice the digits, so rounding it to float32 gives the correct result.
    """
    return x.double().sqrt().float() if x.device.type == "cpu" else x.sqrt()
