"""A Hugging Face model on this accelerator: load it, make it write text.

Nothing heavy is imported until a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acclimate.inference.generation import Generation, GenerationInterrupted, generate
    from acclimate.inference.loading import LoadedModel, load_model

__all__ = ["Generation", "GenerationInterrupted", "LoadedModel", "generate", "load_model"]

_HOMES = {
    "Generation": "acclimate.inference.generation",
    "GenerationInterrupted": "acclimate.inference.generation",
    "LoadedModel": "acclimate.inference.loading",
    "generate": "acclimate.inference.generation",
    "load_model": "acclimate.inference.loading",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'acclimate.inference' has no attribute {name!r}")
    return getattr(import_module(home), name)
