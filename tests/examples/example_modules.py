"""Loads modules of examples/ under names of their own: others too may be called "progress"."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from training import EXAMPLES


def example_module(name: str) -> Any:
    """``examples/<name>.py``, which must not import its neighbours."""
    unique = f"acclimate_example_{name}"
    if unique not in sys.modules:
        spec = importlib.util.spec_from_file_location(unique, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[unique] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[unique]
