"""Recognises the modules that may be split: linear modules, experts and embeddings.

Other code may use the weights of linear modules directly; such modules stay whole.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

_LINEAR = nn.Linear.forward, nn.functional.linear


def linear_is_replaced() -> bool:
    """Whether someone has put other functions in place of torch's for linear modules."""
    return (nn.Linear.forward, nn.functional.linear) != _LINEAR


def linear_dims(module: nn.Module) -> tuple[int, int] | None:
    """Returns the dimensions of a linear module's weight that are its columns (outputs) and rows (inputs)."""
    own = dict(module.named_parameters(recurse=False))
    if "weight" not in own or own["weight"].dim() != 2 or not set(own) <= {"weight", "bias"}:
        return None
    if any(True for _ in module.children()) or isinstance(module, nn.Embedding):
        return None
    if type(module).forward is nn.Linear.forward and "forward" not in vars(module):
        return (0, 1)
    return _tried_dims(module)


def _tried_dims(module: nn.Module) -> tuple[int, int] | None:
    """Like ``linear_dims`` for a module with its own forward: runs a small copy and compares."""
    whole = tuple(module.weight.shape)  # type: ignore[arg-type]
    shape = (5, 7)
    small = copy.copy(module)
    if "forward" in vars(module):  # set on this module alone, as Accelerate's hooks are; may belong to it
        kept = {id(p): p for p in module.parameters()}
        with contextlib.suppress(Exception):  # a module that cannot be copied does not count as linear
            small = copy.deepcopy(module, kept)
    small._parameters = dict(module._parameters)
    small._forward_pre_hooks = type(small._forward_pre_hooks)()
    small._forward_hooks = type(small._forward_hooks)()
    random = torch.Generator().manual_seed(0)
    weight = torch.rand(shape, generator=random)
    small._parameters["weight"] = nn.Parameter(weight)
    for columns, rows in ((0, 1), (1, 0)):
        inputs = torch.rand(2, 3, shape[rows], generator=random)
        expected = inputs @ (weight.T if rows == 1 else weight)
        if module._parameters.get("bias") is not None:
            bias = torch.rand(shape[columns], generator=random)
            small._parameters["bias"] = nn.Parameter(bias)
            expected = expected + bias
        for name, value in vars(module).items():
            if isinstance(value, int) and not isinstance(value, bool) and value in whole:
                small.__dict__[name] = shape[columns] if value == whole[columns] else shape[rows]
        # A forward may raise anything; a module that fails here does not count as linear.
        with contextlib.suppress(Exception), torch.no_grad():
            found = small(inputs)
            is_same = isinstance(found, Tensor) and found.shape == expected.shape
            if is_same and torch.allclose(found, expected):
                return columns, rows
    return None


def expert_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the weights of a module that holds many experts, by name; none for any other module."""
    if isinstance(module, _ConvNd):
        return {}
    if any(
        name.endswith("weight") and p.dim() == 2
        for c in module.children()
        for name, p in c.named_parameters()
    ):
        return {}  # linear modules in it are split themselves
    own = {n: p for n, p in module.named_parameters(recurse=False) if p.dim() == 3 and p.shape[0] > 1}
    return own if len(own) > 1 and len({p.shape[0] for p in own.values()}) == 1 else {}


def _end(model: nn.Module, getter: str) -> Any:
    """Returns the embedding or output head that a model, or its first inner model, names."""
    for module in model.modules():
        # Some models lack one of them, and some return a list.
        with contextlib.suppress(NotImplementedError, AttributeError):
            found = getattr(module, getter)()
            if isinstance(found, nn.Module):
                return found
    return None


def embeddings(model: nn.Module) -> tuple[list[str], str | None]:
    """Returns the names of the vocabulary's embeddings, and of the output head."""
    inputs, head = _end(model, "get_input_embeddings"), _end(model, "get_output_embeddings")
    # A decoder may have its own table, which it shares with the head.
    weights = (getattr(embedding, "weight", None) for embedding in (inputs, head))
    shared = {id(weight) for weight in weights if weight is not None}
    first, last = [], None
    for name, module in model.named_modules(remove_duplicate=False):
        is_embedding = isinstance(module, nn.Embedding)
        if is_embedding and (module is inputs or id(module.weight) in shared):
            first.append(name)
        elif isinstance(head, nn.Module) and module is head and linear_dims(module) is not None:
            last = name
    return first, last


def may_access_weights(module: nn.Module) -> bool:
    """Whether the code of a module's class may use the weights of its submodules."""
    lists = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    if type(module).__module__.startswith("torch."):
        return not isinstance(module, lists)
    for kind in type(module).__mro__:
        if kind.__module__.startswith(("torch.", "builtins", "transformers.modeling_")):
            continue
        for name, function in vars(kind).items():
            code = getattr(function, "__code__", None)
            if name.startswith(("__init__", "_init_weights")) or not isinstance(code, CodeType):
                continue
            if {"weight", "bias", "parameters", "named_parameters"} & set(code.co_names):
                return True
    return False


class CalledLinears(TorchFunctionMode):
    """Watches modules during a run, and finds those whose weights only their own forward uses."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._names = {id(p): name for name, module in modules.items() for p in module.parameters()}
        self._running: list[str] = []
        self._called: set[str] = set()
        self._lent: set[str] = set()
        for name, module in modules.items():
            module.forward = self._watched(name, module.forward)

    def _watched(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._called.add(name)
            self._running.append(name)
            try:
                return forward(*args, **kwargs)
            finally:
                self._running.pop()

        return watched

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # A property, such as a device, says nothing about the numbers.
        if getattr(func, "__name__", "") != "__get__":
            for argument in (*args, *(kwargs or {}).values()):
                name = self._names.get(id(argument)) if isinstance(argument, Tensor) else None
                if name is not None and name not in self._running[-1:]:
                    self._lent.add(name)
        return func(*args, **(kwargs or {}))

    def found(self) -> set[str]:
        """Returns the names of the modules that are called and whose weights no other code uses."""
        return self._called - self._lent
