"""Notes which methods of a backend's class really ran."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

from stand_ins.log import note


def watch(backend: str) -> None:
    """From now on each call of a method that the class of a backend defines is noted, once a process.

    Args:
        backend: ``"module:Class"``.
    """
    for owner, name, member in overrides(backend):
        function = member.fget if isinstance(member, property) else member
        wrapped = _noting(f"{owner.__name__}.{name}", function)
        setattr(owner, name, property(wrapped) if isinstance(member, property) else wrapped)


def overrides(backend: str) -> Iterator[tuple[type[Any], str, Any]]:
    """The methods and properties that a backend's class defines, or one that it derives from."""
    module, _, attribute = backend.partition(":")
    for owner in getattr(importlib.import_module(module), attribute).__mro__:
        if owner.__module__.startswith("acclimate.backends."):
            for name, member in list(vars(owner).items()):
                if isinstance(member, (types.FunctionType, property)):
                    yield owner, name, member


def _noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        note("executed", name)
        return function(*args, **kwargs)

    return call
