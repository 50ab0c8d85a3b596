"""Finds transformers' class for a configuration, and builds its model without weights, on the meta device."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from acclimate.errors import ModelNotFoundError, UnsupportedModelError, excerpt
from acclimate.llm.files.folder import check_config, weight_totals
from acclimate.llm.files.model_limits import WeightTotals, bounded_model
from acclimate.llm.files.remote_code import check_remote_code
from acclimate.llm.gguf.convert import empty_gguf_model
from acclimate.llm.loading.loaded_model import choose_dtype, dtype_name, require_transformers
from acclimate.llm.loading.locate import local_model
from acclimate.llm.quiet import explained_failures, first_line
from acclimate.selection import get_accelerator

# For a configuration without weights beside it: far above any real model.
_LARGEST = 200_000, 10**14


def empty_model(
    model: str | os.PathLike[str], dtype: str = "auto", *, trust_remote_code: bool = False
) -> tuple[Any, str]:
    """Returns a model without weights, and its name.

    Args:
        model: a folder that has at least a config.json, a ``.gguf`` file, or the id of a model on the hub,
            from which only the configuration is downloaded.
        dtype: the ``dtype`` argument of :func:`acclimate.llm.load_model`.
        trust_remote_code: whether Python code that comes with the model may run.

    Raises:
        ModelNotFoundError: there is no such model.
        UnsupportedModelError: transformers cannot build it.
    """
    import torch

    dtype = dtype_name(dtype)
    require_transformers()
    chosen = choose_dtype(get_accelerator(), dtype)
    text = os.fspath(model)
    folder, gguf = local_model(text)
    if gguf is not None:
        return empty_gguf_model(gguf).to(chosen), gguf.name
    totals = WeightTotals(text, *_LARGEST)
    if folder is not None:
        if not trust_remote_code:
            check_remote_code(folder)
        check_config(folder)
        with contextlib.suppress(ModelNotFoundError):
            totals = weight_totals(folder)
    with explained_failures("build", f"the model {excerpt(text)}"):
        config = _config(text if folder is None else str(folder), folder is not None, trust_remote_code)
        with torch.device("meta"), bounded_model(totals):
            built = model_class(config, text)._from_config(config, dtype=chosen)
    return built, folder.name if folder is not None else text


def _config(source: str, is_local: bool, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            source, local_files_only=is_local, trust_remote_code=trust_remote_code
        )
    except OSError as error:
        raise ModelNotFoundError(
            f"there is no folder or file '{excerpt(source)}', and no configuration of it on the hub: "
            f"{first_line(error)}"
        ) from error


# In the order of preference.
_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText")


def model_class(config: Any, source: str) -> Any:
    """Returns the class of a text-generating model for a transformers config from a folder or the hub.

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
