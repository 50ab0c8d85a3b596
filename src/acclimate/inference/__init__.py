"""Loads a language model onto this process's accelerator and generates text with it.

Importing this package imports neither torch nor transformers; names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acclimate.lazy import lazy_names

if TYPE_CHECKING:
    from acclimate.inference.generation.generate import Generation, GenerationInterrupted, generate
    from acclimate.inference.loading.initialize import init_inference, load_split_model
    from acclimate.inference.loading.load import load_model
    from acclimate.inference.model.loaded_model import LoadedModel

__all__ = [
    "Generation",
    "GenerationInterrupted",
    "LoadedModel",
    "generate",
    "init_inference",
    "load_model",
    "load_split_model",
]

_HOMES = {
    "Generation": "acclimate.inference.generation.generate",
    "GenerationInterrupted": "acclimate.inference.generation.generate",
    "LoadedModel": "acclimate.inference.model.loaded_model",
    "generate": "acclimate.inference.generation.generate",
    "init_inference": "acclimate.inference.loading.initialize",
    "load_model": "acclimate.inference.loading.load",
    "load_split_model": "acclimate.inference.loading.initialize",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
