"""Builds a transformers model without reading weights: on the meta device, or with deferred parameters.

With deferred parameters transformers' loading runs. transformers renames, converts and ties the tensors of a
checkpoint, and decides which are missing or superfluous. Here it does so on deferred tensors, so that each
rank can load only its slices without a second implementation of those rules.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from acclimate.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError, excerpt
from acclimate.llm.files.checkpoint import HostTensor, open_weights
from acclimate.llm.files.deferred_tensors import Source, deferred
from acclimate.llm.files.folder import check_config, weight_files, weight_totals
from acclimate.llm.files.model_limits import WeightTotals, bounded_model
from acclimate.llm.files.open_file import OpenFile
from acclimate.llm.files.remote_code import check_remote_code
from acclimate.llm.gguf.convert import empty_gguf_model
from acclimate.llm.loading.loaded_model import choose_dtype, dtype_name, require_transformers
from acclimate.llm.loading.locate import FoundModel, local_model
from acclimate.llm.loading.weight_report import check_report
from acclimate.llm.published.settings import quantization_settings
from acclimate.llm.published.tensors import published_tensors
from acclimate.llm.quiet import explained_failures, first_line, quiet_transformers
from acclimate.selection import get_accelerator

_QUANTIZATION_SETTINGS = ("quantization_config", "compression_config")


@contextlib.contextmanager
def deferred_model(
    found: FoundModel,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool = False,
    ignore_extra: tuple[str, ...] = (),
) -> Iterator[tuple[Any, list[OpenFile]]]:
    """Yields a model with deferred parameters, which can be read in the ``with`` block, and its files.

    The arguments are those of :func:`acclimate.llm.load_model`; some parameters stay float32, as in
    transformers.

    Raises:
        CorruptModelError: a tensor is missing, superfluous, or has the wrong shape or size.
        UnsupportedModelError: transformers cannot build the model, or its weights cannot be read in parts.
    """
    with _open(found, dtype) as (files, tensors):
        totals = (
            weight_totals(found.folder)
            if found.gguf is None
            else WeightTotals(
                str(found.gguf), len(tensors), sum(tensor.numel() for tensor in tensors.values())
            )
        )
        model, report = _build(found.folder, dtype, trust_remote_code, tensors, totals)
        check_report(found.folder, report, ignore_extra)
        yield model.eval(), files


@contextlib.contextmanager
def _open(found: FoundModel, dtype: torch.dtype) -> Iterator[tuple[list[OpenFile], dict[str, Any]]]:
    """Opens a model's files; yields them, and their tensors by name."""
    if found.gguf is not None:
        from acclimate.llm.gguf.tensors import read_index

        file, parameters = read_index(found.folder, found.gguf, dtype, found.state)
        with contextlib.closing(file):
            yield [file], {parameter.name: deferred(parameter) for parameter in parameters}
        return
    settings = quantization_settings(found.folder)
    with open_weights(found.folder) as files:
        tensors: dict[str, Source] = {
            tensor.name: tensor for file in files for tensor in file.tensors.values()
        } or _pickled(found.folder)
        if settings is not None:
            tensors = published_tensors(settings, tensors)
        yield list(files), {name: deferred(source) for name, source in tensors.items()}


def _pickled(folder: Path) -> dict[str, Source]:
    """Returns the tensors of ``.bin`` files, which stay in the files until they are used."""
    tensors: dict[str, Source] = {}
    for path in weight_files(folder):
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            tensors |= {name: HostTensor(name, values) for name, values in content.items()}
        except (pickle.UnpicklingError, EOFError, RuntimeError, AttributeError) as error:
            raise CorruptModelError(
                f"{path} is damaged, was written by torch before 1.6, or holds something other than tensors"
            ) from error
    return tensors


def _build(
    folder: Path,
    dtype: torch.dtype,
    trust_remote_code: bool,
    tensors: Mapping[str, Any],
    totals: WeightTotals,
) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoConfig

    with quiet_transformers(), explained_failures("build", f"the model in {folder}"):
        config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        # What is quantised in the files has been given the names and shapes of plain weights.
        for settings in _QUANTIZATION_SETTINGS:
            vars(config).pop(settings, None)
        kind = model_class(config, str(folder))

        with bounded_model(totals):
            model, report = kind.from_pretrained(
                None,
                config=config,
                state_dict=dict(tensors),
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # check_report names them
            )
        _adopt_generation_settings(model, folder)
        model.config.name_or_path = model.name_or_path = str(folder)
    return model, report


def _adopt_generation_settings(model: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    if not model.can_generate():
        return
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    else:
        model.generation_config = GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", local_files_only=True, _from_model_config=True
        )


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
