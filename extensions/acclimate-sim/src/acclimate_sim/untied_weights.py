"""Warns if ``Module.to()`` creates new Parameters and so unties weights: ``ACCLIMATE_SIM="replace=yes"``.

Real hardware that replaces Parameters does not warn, and the model then trains two copies of one tied weight.
"""

from __future__ import annotations

import functools
import threading
import warnings
from itertools import combinations
from typing import Any

import torch

_local = threading.local()


def register() -> None:
    """Makes ``Module.to()`` and similar methods warn about weights that they untie."""
    apply: Any = torch.nn.Module._apply  # to(), float(), to_empty() and the device's own method all call it

    @functools.wraps(apply)
    def apply_and_compare(self: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        if getattr(_local, "is_moving", False):  # a child of the module that moves
            return apply(self, *arguments, **options)
        tied = _tied(self)
        _local.is_moving = True
        try:
            moved = apply(self, *arguments, **options)
        finally:
            _local.is_moving = False
        names = dict(self.named_parameters(remove_duplicate=False))
        for first, second in tied:
            if names[first] is not names[second]:
                warnings.warn(_message(first, second), stacklevel=3)
        return moved

    torch.nn.Module._apply = apply_and_compare  # type: ignore[method-assign]


def _tied(module: torch.nn.Module) -> list[tuple[str, str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [pair for group in names.values() for pair in combinations(group, 2) if pair[0] == group[0]]


def _message(first: str, second: str) -> str:
    return (
        f'the move created new Parameters, so "{second}" is no longer tied to "{first}" (ACCLIMATE_SIM has '
        "replace=yes; Gaudi and XLA do this without a warning). Tie them again after the move: assign one to "
        "the other, or call the model's tie_weights() if it has one."
    )
