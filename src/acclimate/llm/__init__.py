"""Loads a language model onto this process's accelerator and generates text with it.

Importing this package imports neither torch nor transformers; names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acclimate.host.lazy import lazy_names

if TYPE_CHECKING:
    from acclimate.llm.generation import Generation, GenerationInterrupted, generate
    from acclimate.llm.loading.initialize import init_inference
    from acclimate.llm.loading.load import load_model, load_split_model
    from acclimate.llm.loading.loaded_model import LoadedModel

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
    "Generation": "acclimate.llm.generation",
    "GenerationInterrupted": "acclimate.llm.generation",
    "LoadedModel": "acclimate.llm.loading.loaded_model",
    "generate": "acclimate.llm.generation",
    "init_inference": "acclimate.llm.loading.initialize",
    "load_model": "acclimate.llm.loading.load",
    "load_split_model": "acclimate.llm.loading.load",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
