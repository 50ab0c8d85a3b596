"""Finds linear modules that are only called, as opposed to ones whose weights other code uses directly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


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
