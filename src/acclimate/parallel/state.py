"""Copies of what a call gets besides tensors, such as a cache, which the call changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, nn.Module)


class _Detaching(TorchFunctionMode):
    """Copies tensors that were computed without their graph; torch copies leaves only."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _is_state(value: Any) -> bool:
    return not isinstance(value, (Tensor, *PLAIN)) and not callable(value)


def copied(value: Any) -> Any:
    """Returns a deep copy of an object, without graphs."""
    with _Detaching():
        return copy.deepcopy(value)


def as_given(values: Any) -> Any:
    """Returns nested values as they are now: tensors themselves, and copies of what may change."""
    return pytree.tree_map(lambda each: copied(each) if _is_state(each) else each, values)


def fresh(values: Any) -> Any:
    """Returns nested values for one more call: tensors cut off from the graph, and copies of all else."""

    def renewed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach()
        return copied(value) if _is_state(value) else value

    return pytree.tree_map(renewed, values)
