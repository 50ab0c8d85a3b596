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


def follow_config(module: nn.Module, whole: Any, own_values: frozenset[str]) -> None:
    """Keeps a module's copy of the model's configuration equal to it, besides the rank's own values.

    Later settings, such as another attention function, are made in the model's configuration.
    """
    # An attribute, so that a deep copy of the model follows the configuration of the copy.
    module._acclimate_whole_config = whole

    def follow(module: Any, _: object) -> None:
        settings = vars(module._acclimate_whole_config).items()
        vars(module.config).update({name: value for name, value in settings if name not in own_values})

    module.register_forward_pre_hook(follow)
