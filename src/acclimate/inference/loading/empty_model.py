"""Builds a model without weights, on the meta device, from its configuration only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from acclimate.errors import AcclimateError, ModelNotFoundError, UnsupportedModelError, excerpt, some_of
from acclimate.inference.files.folder import check_config, weight_totals
from acclimate.inference.files.model_limits import WeightTotals, bounded_model
from acclimate.inference.files.remote_code import check_remote_code
from acclimate.inference.gguf.convert import empty_gguf_model
from acclimate.inference.loading.locate import existing_path
from acclimate.inference.loading.model_class import model_class
from acclimate.inference.model.loaded_model import check_dtype_name, choose_dtype, require_transformers
from acclimate.inference.quiet import first_line, why_unusable
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
        dtype: the ``dtype`` argument of :func:`acclimate.inference.load_model`.
        trust_remote_code: whether Python code that comes with the model may run.

    Raises:
        ModelNotFoundError: there is no such model.
        UnsupportedModelError: transformers cannot build it.
    """
    import torch

    check_dtype_name(dtype)
    require_transformers()
    chosen = choose_dtype(get_accelerator(), dtype)
    text = os.fspath(model)
    path = existing_path(text)
    gguf = _gguf_file(path) if path is not None else None
    if gguf is not None:
        return empty_gguf_model(gguf).to(chosen), gguf.name
    totals = WeightTotals(text, *_LARGEST)
    if path is not None:
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"{path} holds no model: there is no config.json in it")
        if not trust_remote_code:
            check_remote_code(path)
        check_config(path)
        with contextlib.suppress(ModelNotFoundError):
            totals = weight_totals(path)
    try:
        config = _config(text if path is None else str(path), path is not None, trust_remote_code)
        with torch.device("meta"), bounded_model(totals):
            built = model_class(config, text)._from_config(config, dtype=chosen)
    except AcclimateError:
        raise
    except Exception as error:  # any type: transformers does not check a config's fields
        raise UnsupportedModelError(
            f"transformers cannot build the model {excerpt(text)}: {why_unusable(error)}"
        ) from error
    return built, path.name if path is not None else text


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


def _gguf_file(path: Path) -> Path | None:
    """Returns the GGUF file at a path, or in the folder at a path, if there is one."""
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return path
        raise ModelNotFoundError(f"{path} is neither a model folder nor a .gguf file")
    if (path / "config.json").is_file():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = some_of((file.name for file in files), most=20)
        raise ModelNotFoundError(f"{path} holds several GGUF files; give the path of one: {names}")
    return files[0] if files else None
