"""The class of transformers that a model's configuration asks for."""

from __future__ import annotations

from typing import Any

from acclimate.errors import UnsupportedModelError

# By preference.
_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText")


def model_class(config: Any, source: str) -> Any:
    """Returns the class of the model that a config describes, one that generates text.

    Args:
        config: of transformers.
        source: the folder or hub id it is from.

    Raises:
        UnsupportedModelError: transformers has none.
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
    """Of several classes that transformers has for a config, the one that the config names."""
    if not isinstance(known, (list, tuple)):
        return known
    names = getattr(config, "architectures", None) or []
    return next((each for each in known if each.__name__ in names), known[0])
