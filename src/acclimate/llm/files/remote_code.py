"""Checks whether a model's settings ask for Python code that is not part of transformers.

transformers asks on stdin whether it may run such code, so a "y" in a pipe is enough. acclimate never asks:
code from the folder or the hub runs only with ``trust_remote_code``. If transformers itself has the model's
type, transformers' code is used, even if the model comes with code.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from acclimate.errors import RemoteCodeError
from acclimate.llm.files.folder import read_settings

logger = logging.getLogger("acclimate.llm")

# Fields whose value can be the name of a kernel on the hub, which is compiled code.
_KERNELS = frozenset(
    {
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
        "experts_implementation",
        "_experts_implementation",
        "_experts_implementation_internal",
    }
)
# Settings that make `generate` run code from the hub, each with its harmless values.
_GENERATION: dict[str, tuple[object, ...]] = {
    "custom_generate": (None,),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "num_beam_groups": (None, 1),
    "constraints": (None,),
    "force_words_ids": (None,),
}


def check_remote_code(folder: Path) -> None:
    """Checks that a folder can be loaded and run without its own Python code.

    Raises:
        RemoteCodeError: it cannot; the message names the file and the field.
    """
    config_path, config = _settings(folder, "config.json")
    tokenizer_path, tokenizer = _settings(folder, "tokenizer_config.json")
    generation_path, generation = _settings(folder, "generation_config.json")
    if "auto_map" in config and not _has_own_model(config):
        raise _refusal(config_path, "auto_map")
    if "auto_map" in tokenizer and not _has_own_tokenizer(tokenizer, config):
        raise _refusal(tokenizer_path, "auto_map")
    for path, settings in ((config_path, config), (generation_path, generation)):
        for field in _named_kernels(settings):
            raise _refusal(path, field)
        for field, harmless in _GENERATION.items():
            if field in settings and settings[field] not in harmless:
                raise _refusal(path, field)
    ignored = [
        path
        for path, settings in ((config_path, config), (tokenizer_path, tokenizer))
        if "auto_map" in settings
    ]
    if (folder / "custom_generate" / "generate.py").is_file():
        ignored.append(folder / "custom_generate" / "generate.py")
    for path in ignored:
        logger.info("using transformers' own code for this model and not the code named in %s", path)


def _refusal(path: Path, field: str) -> RemoteCodeError:
    return RemoteCodeError(
        f"{path} asks for Python code that is not part of transformers (field {field}); read that code, "
        "and if you trust it, pass --trust_remote_code, or trust_remote_code=True"
    )


def _settings(folder: Path, name: str) -> tuple[Path, dict[str, Any]]:
    path = folder / name
    return path, read_settings(path) if path.is_file() else {}


def _has_own_model(config: dict[str, Any]) -> bool:
    """Whether transformers has a class for a language model with this config."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind = config.get("model_type")
    return (
        isinstance(kind, str)
        and kind in CONFIG_MAPPING
        and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING
    )


def _has_own_tokenizer(tokenizer: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether transformers has this tokenizer's class."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING, tokenizer_class_from_name

    name, kind = tokenizer.get("tokenizer_class"), config.get("model_type")
    if name is None:
        return isinstance(kind, str) and kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in TOKENIZER_MAPPING
    if not isinstance(name, str):
        return False
    return any(
        tokenizer_class_from_name(class_name) is not None for class_name in (name, name.removesuffix("Fast"))
    )


def _named_kernels(value: Any) -> Iterator[str]:
    """Yields the fields, at any depth, that name a kernel on the hub."""
    if isinstance(value, list):
        for item in value:
            yield from _named_kernels(item)
    if not isinstance(value, dict):
        return
    for field, item in value.items():
        if field in _KERNELS and "/" in str(item):
            yield field
        else:
            yield from _named_kernels(item)
