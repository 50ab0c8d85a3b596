"""Loads a model and its tokenizer, onto this process's accelerator or split over the job's ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

# First, since it imports torch in a way that no package that torch loads can end this process.
import acclimate.accelerator  # noqa: F401
from acclimate.llm.files.converted import model_name
from acclimate.llm.files.folder import weight_files
from acclimate.llm.files.open_file import OpenFile, mapped_files
from acclimate.llm.loading.adapter import find_adapter
from acclimate.llm.loading.finite_dtype import load_in_finite_dtype
from acclimate.llm.loading.loaded_model import (
    LoadedModel,
    choose_dtype,
    dtype_name,
    load_tokenizer,
    memory_errors,
    require_transformers,
)
from acclimate.llm.loading.locate import FoundModel
from acclimate.llm.loading.packer import check_cache_dtype, check_format, has_kernels
from acclimate.llm.loading.slice_loader import SliceLoader, split_loaded
from acclimate.llm.loading.weight_report import read_whole
from acclimate.llm.published.settings import quantization_settings
from acclimate.llm.ranks import ModelRanks, join_model_ranks
from acclimate.ops.build.compile import watch_builds
from acclimate.selection import get_accelerator

if TYPE_CHECKING:
    import torch

    from acclimate.llm.text.tokenizers import Tokenizer


def load_model(
    model: str | os.PathLike[str] | None = None,
    *,
    dtype: str = "auto",
    quantize: str | None = None,
    kv_cache_dtype: str = "auto",
    trust_remote_code: bool = False,
    ignore_extra: Iterable[str] = (),
) -> LoadedModel:
    """Loads a model onto this process's accelerator.

    Args:
        model: a folder, a ``.gguf`` file, the id of a model on the Hugging Face hub, or ``None`` for the
            demo model. The folder of a PEFT adapter stands for its base model, into which it is merged.
        dtype: ``bfloat16``, ``float16``, ``float32``, or ``auto``: the first of these that the accelerator
            supports. With ``auto``, a GGUF file runs from its own quantised blocks.
        quantize: ``int8`` or ``int4``: the format in which the weights of linear modules and embeddings are
            stored.
        kv_cache_dtype: ``int8`` or ``auto``: the ``kv_cache_dtype`` argument of
            :func:`acclimate.init_inference`.
        trust_remote_code: whether Python code that comes with the model may run.
        ignore_extra: patterns, such as ``v_head.*``, of tensors in the files that the model does not use.

    Raises:
        QuantizationError: ``quantize`` is neither ``int8`` nor ``int4``, or ``kv_cache_dtype`` neither
            ``int8`` nor ``auto``.
        ModelNotFoundError: there is no such model.
        CorruptModelError: its files are truncated, unreadable or do not fit together.
        UnsupportedModelError: it is not a language model that transformers can run.
        RemoteCodeError: it needs its own Python code, which may not run.
        GenerationOptionError: there is no such dtype, or the accelerator does not support it.
        DeviceMemoryError: it does not fit into the accelerator's memory.
        MissingExtraError: a required package is not installed.
        CacheWriteError: a converted model cannot be written to the cache.
    """
    return _loaded(
        model, ModelRanks(), _load_alone, dtype, quantize, kv_cache_dtype, trust_remote_code,
        tuple(ignore_extra),
    )  # fmt: skip


def load_split_model(
    model: str | os.PathLike[str] | None = None,
    *,
    dtype: str = "auto",
    quantize: str | None = None,
    kv_cache_dtype: str = "auto",
    trust_remote_code: bool = False,
    ignore_extra: Iterable[str] = (),
) -> LoadedModel:
    """Loads a model and its tokenizer, split over the job's ranks, for :func:`acclimate.llm.generate`.

    The arguments are those of :func:`load_model`.

    Raises:
        AcclimateError: the errors of :func:`acclimate.llm.init_inference`.
    """
    return _loaded(
        model, None, SliceLoader.load, dtype, quantize, kv_cache_dtype, trust_remote_code,
        tuple(ignore_extra),
    )  # fmt: skip


def _loaded(
    model: str | os.PathLike[str] | None,
    sharing: ModelRanks | None,
    load: Callable[[SliceLoader, FoundModel], Any],
    dtype: str,
    quantize: str | None,
    kv_cache_dtype: str,
    trust_remote_code: bool,
    ignore_extra: tuple[str, ...],
) -> LoadedModel:
    """Loads a model and its tokenizer for the ranks that share it; ``None``: all ranks of the job."""
    start = time.perf_counter()
    dtype = dtype_name(dtype)
    check_format(quantize)
    check_cache_dtype(kv_cache_dtype)
    require_transformers()
    import torch

    accelerator = get_accelerator()
    tokenizers: list[Tokenizer] = []

    def take_tokenizer(folder: Path) -> None:
        with memory_errors(accelerator, f"the model {model_name(folder)}"):
            tokenizers.append(load_tokenizer(folder, trust_remote_code))

    def load_in(chosen: torch.dtype) -> LoadedModel:
        with ranks.all_or_none():
            merged, adapter = None, find_adapter(model)
            if adapter is not None:
                with memory_errors(accelerator, f"the model {adapter.base}"):
                    merged, tokenizer_folder = adapter.load(
                        chosen, trust_remote_code=trust_remote_code, ignore_extra=ignore_extra
                    )
                take_tokenizer(tokenizer_folder)
        if adapter is not None:
            module, folder = split_loaded(merged, chosen, accelerator, ranks, quantize), adapter.folder
        else:
            loader = SliceLoader(
                accelerator,
                ranks,
                chosen,
                is_dtype_asked_for=dtype != "auto",
                quantize=quantize,
                trust_remote_code=trust_remote_code,
                ignore_extra=ignore_extra,
            )
            # The tokenizer comes first, because loading it takes much more memory than it keeps.
            module = loader.from_files(model, with_tokenizer=True, before=take_tokenizer, load=load)
            folder = module.whole.folder
        seconds = time.perf_counter() - start - builds.seconds
        return LoadedModel(module, tokenizers[-1], folder, accelerator, chosen, seconds, builds.seconds)

    # transformers' loading fails in inference mode, and its weights could never be trained.
    with torch.inference_mode(False), watch_builds() as builds:
        ranks = join_model_ranks(accelerator, None) if sharing is None else sharing
        accelerator.reset_peak_memory_stats()
        with ranks.all_or_none():
            chosen = choose_dtype(accelerator, dtype)
        loaded = load_in_finite_dtype(load_in, chosen, accelerator, ranks, is_asked_for=dtype != "auto")
        loaded.module.kv_cache_dtype = kv_cache_dtype
        return loaded


def _load_alone(loader: SliceLoader, found: FoundModel) -> Any:
    """Loads a model for one rank; weights that are not quantised stay mapped from their files."""
    from acclimate.llm.loading.packed_modules import use_few_row_kernels

    folder, accelerator = found.folder, loader.accelerator
    if found.gguf is not None or loader.quantize is not None or quantization_settings(folder) is not None:
        return loader.load(found)
    device = accelerator.current_device_name()
    with memory_errors(accelerator, f"the model {model_name(folder)}"):
        module = _load_module(folder, loader.dtype, loader.trust_remote_code, loader.ignore_extra).to(device)
        if has_kernels(device):
            use_few_row_kernels(module)
        accelerator.synchronize()
        return module


def _load_module(
    folder: Path, dtype: torch.dtype, trust_remote_code: bool, ignore_extra: tuple[str, ...]
) -> Any:
    from acclimate.llm.loading.inference_model import Whole, as_inference_model

    files = [OpenFile(path) for path in weight_files(folder)]
    module = read_whole(folder, dtype, trust_remote_code, ignore_extra)
    made = as_inference_model(module.eval(), None, ModelRanks(), Whole.of(module, folder))
    made.mapped_files = mapped_files(module, files)
    for file in files:
        file.check_unchanged("loaded")
    return made
