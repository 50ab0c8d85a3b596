"""Refuses code of a model that keeps state outside of its modules, where a capture cannot see it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from acclimate.llm.decode.description import NotRepresentedError

_KNOWN = ("torch.", "transformers.", "acclimate.")
"""The packages whose modules keep no state outside: their classes are not read."""
_CHANGING = {"time", "random", "datetime", "os", "secrets", "uuid", "threading", "numpy", "numpy.random"}
"""Python modules whose functions may answer otherwise at the next call."""


def check_code(model: nn.Module) -> None:
    """Raises :class:`NotRepresentedError` if a function of a user's own module class names such state."""
    classes = {base for module in model.modules() for base in type(module).__mro__ if base is not object}
    for cls in classes:
        if f"{cls.__module__}.".startswith(_KNOWN):
            continue
        for function in vars(cls).values():
            if not isinstance(function, types.FunctionType):
                continue
            for name, value in _named(function):
                if _may_change(value):
                    raise NotRepresentedError(f"{function.__qualname__} uses {name}, which may change")


def _named(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the global and enclosing variables that a function names."""
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it is empty
            continue


def _may_change(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__ in _CHANGING
    if isinstance(value, (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, type)):
        return False
    return not callable(value)
