"""Finds transformers' class for a model's configuration."""

from __future__ import annotations

from typing import Any

from acclimate.errors import UnsupportedModelError

# In the order of preference.
_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText")


def model_class(config: Any, source: str) -> Any:
    """Returns the class of a text-generating model for a config.

    Args:
        config: a transformers config.
        source: the folder or hub id that it came from.

    Raises:
        UnsupportedModelError: transformers has no such class.
    """
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    own = getattr(config, "auto_map", None) or {}
    for auto in _AUTO_CLASSES:
        mapping = getattr(transformers, auto)._model_mapping
        if type(config) in mapping:
            return _named(config, mapping[type(config)])
        if auto in own:  # reached with trust_remote_code only: AutoConfig refuses otherwise
            return get_class_from_dynamic_module(own[auto], source)
    raise UnsupportedModelError(
        f"transformers has no model that generates text for {source}, whose model_type is {config.model_type}"
    )


def _named(config: Any, known: Any) -> Any:
    """Returns the class that the config names, if transformers has several for it."""
    if not isinstance(known, (list, tuple)):
        return known
    names = getattr(config, "architectures", None) or []
    return next((kind for kind in known if kind.__name__ in names), known[0])
