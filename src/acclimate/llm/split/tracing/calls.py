"""The calls of modules that a run of a model records, and copies of their arguments, such as a cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


@dataclass
class Call:
    """One call of a module that a stand-in replaces."""

    name: str
    input: Tensor
    """Its first argument, on the graph."""
    output: Tensor
    """A leaf."""


@dataclass
class Invocation:
    """The arguments of one call of a module that runs unchanged."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Replay:
    """The outputs that stand-ins return while one block runs again, and the inputs that they get."""

    outputs: Mapping[str, Tensor]
    seen: dict[str, list[Tensor]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


Record: TypeAlias = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
"""Receives the name and the arguments of a block that is called."""


PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, nn.Module)


class _Detaching(TorchFunctionMode):
    """Detaches computed tensors when they are copied, because ``deepcopy`` accepts only graph leaves.

    Copies of float64 tensors get the dtype ``double``.
    """

    def __init__(self, double: torch.dtype) -> None:
        super().__init__()
        self._double = double

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            is_other = tensor.dtype == torch.float64 != self._double
            if is_other or not tensor.is_leaf:
                if id(tensor) not in memo:
                    new = tensor.detach().clone()
                    memo[id(tensor)] = new.to(self._double) if is_other else new
                return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


class NoEmptyAttention(TorchFunctionMode):
    """Raises an error for attention over an empty tensor, as with no heads.

    torch 2.10 divides by zero, which ends the process.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is scaled_dot_product_attention:
            tensors = (*args, *(kwargs or {}).values())
            if any(isinstance(tensor, Tensor) and tensor.numel() == 0 for tensor in tensors):
                raise ValueError("attention over an empty tensor")
        return func(*args, **(kwargs or {}))


def _is_state(value: Any) -> bool:
    return not isinstance(value, (Tensor, *PLAIN)) and not callable(value)


def copied(value: Any, double: torch.dtype = torch.float64) -> Any:
    """Returns a deep copy of an object whose tensors are detached; those of float64 get another dtype."""
    with _Detaching(double):
        return copy.deepcopy(value)


def as_given(values: Any) -> Any:
    """Returns nested values with tensors unchanged and mutable objects copied."""
    return pytree.tree_map(lambda leaf: copied(leaf) if _is_state(leaf) else leaf, values)


def fresh(values: Any) -> Any:
    """Returns nested values for one more call, with tensors detached and other objects copied."""

    def renewed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach()
        return copied(value) if _is_state(value) else value

    return pytree.tree_map(renewed, values)


def detached(values: Any) -> Any:
    """Returns nested values with all tensors detached."""
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, values)
