"""Loads a language model onto this process's accelerator and generates text with it.

torch and transformers are imported only when a name is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acclimate.lazy import lazy_names

if TYPE_CHECKING:
    from acclimate.inference.generation import Generation, GenerationInterrupted, generate
    from acclimate.inference.initialize import init_inference, load_split_model
    from acclimate.inference.loaded_model import LoadedModel
    from acclimate.inference.loading import load_model

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
    "Generation": "acclimate.inference.generation",
    "GenerationInterrupted": "acclimate.inference.generation",
    "LoadedModel": "acclimate.inference.loaded_model",
    "generate": "acclimate.inference.generation",
    "init_inference": "acclimate.inference.initialize",
    "load_model": "acclimate.inference.loading",
    "load_split_model": "acclimate.inference.initialize",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
