"""Sets attributes of modules and of their configurations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn


def set_attribute(module: nn.Module, attribute: str, value: Any) -> Callable[[], None]:
    """Sets an attribute of a module, or of a copy of its configuration; returns a function that undoes it."""
    owner, _, last = attribute.rpartition(".")
    if not owner:
        before = getattr(module, attribute)
        setattr(module, attribute, value)
        return lambda: setattr(module, attribute, before)
    whole = getattr(module, owner)
    own = copy.copy(whole)
    setattr(own, last, value)
    setattr(module, owner, own)
    return lambda: setattr(module, owner, whole)
