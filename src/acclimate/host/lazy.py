"""Packages whose public names are imported on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns ``__getattr__`` and ``__dir__`` for a package, from the module of each public name.

    ``dir()`` shows its public names only.
    """
    module = sys.modules[package]

    def get(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        setattr(module, name, value)  # the next use does not call this function
        return value

    def names() -> list[str]:
        return sorted(homes)  # not what the package imports itself

    return get, names
