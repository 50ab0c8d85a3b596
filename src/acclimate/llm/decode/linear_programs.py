"""Tells which modules only multiply by a weight and add a bias, by their program and not by an example."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode

from acclimate.llm.split.tracing.linear_modules import linear_dims

_OF_A_PRODUCT = {
    "t", "transpose", "permute", "view", "_unsafe_view", "reshape", "expand", "clone", "detach", "alias",
    "squeeze", "unsqueeze", "mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "add",
    "device",  # asks for it
}  # fmt: skip


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by a weight and adds a bias, and does nothing else."""
    own = type(module)
    if own.__call__ is not nn.Module.__call__ or own._call_impl is not nn.Module._call_impl:
        return False
    if hasattr(module, "packed"):
        # A class that somebody derived may do more.
        return isinstance(module, nn.Linear) and own.forward.__module__.startswith("acclimate.")
    dims = linear_dims(module)
    if dims is None:
        return False
    return own.forward is nn.Linear.forward or _only_multiplies(module, dims)


def _only_multiplies(module: nn.Module, dims: tuple[int, int]) -> bool:
    """Whether a module's own forward runs operators of a product only, for inputs of any size and value.

    Its results were compared for one input. A limit beyond that input's values, or a branch, would be missed.
    """
    environment = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    mode.cache_enabled = False  # its keys cost more than what is computed once
    weight: Any = module.weight
    made = copy.copy(module)
    given = mode.from_tensor(
        torch.empty((5, 7, weight.shape[dims[1]]), dtype=weight.dtype, device=weight.device),
        symbolic_context=StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]
        ),
        source=ConstantSource("input"),
    )
    parameters: Any = {
        n: None if p is None else mode.from_tensor(p.detach(), static_shapes=True)
        for n, p in module._parameters.items()
    }
    made._parameters = parameters
    before, operators = dict(vars(made)), _Operators()
    try:
        with torch.no_grad(), mode, operators:
            made.forward(given)
    except Exception:  # noqa: BLE001 - a forward may raise anything
        return False
    is_same = vars(made).keys() == before.keys() and all(v is before[n] for n, v in vars(made).items())
    is_free = not environment.guards and not environment.replacements
    return is_same and is_free and operators.names <= _OF_A_PRODUCT


class _Operators(TorchDispatchMode):
    """Notes the names of this thread's operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))
