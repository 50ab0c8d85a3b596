"""Loads a model and its tokenizer onto this process's accelerator."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

# First, since it imports torch in a way that no package that torch loads can end this process.
import acclimate.accelerator  # noqa: F401
from acclimate.errors import CorruptModelError
from acclimate.llm.files.converted import model_name
from acclimate.llm.files.folder import weight_files, weight_totals
from acclimate.llm.files.mapped import mapped_files
from acclimate.llm.files.model_limits import bounded_model
from acclimate.llm.files.open_file import OpenFile
from acclimate.llm.loading.adapter import find_adapter
from acclimate.llm.loading.finite_dtype import load_in_finite_dtype
from acclimate.llm.loading.initialize import SliceLoader, init_inference
from acclimate.llm.loading.loaded_model import (
    LoadedModel,
    choose_dtype,
    dtype_name,
    explained_failures,
    load_tokenizer,
    memory_errors,
    require_transformers,
)
from acclimate.llm.loading.locate import FoundModel, find_and_load, find_model
from acclimate.llm.loading.packer import check_cache_dtype, check_format, gguf_form, has_kernels
from acclimate.llm.loading.weight_report import check_report
from acclimate.llm.published.settings import quantization_settings
from acclimate.llm.quiet import quiet_transformers
from acclimate.llm.ranks import ModelRanks
from acclimate.ops.build.watch import watch_builds
from acclimate.selection import get_accelerator

if TYPE_CHECKING:
    import torch

    from acclimate.accelerator import Accelerator
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
    start = time.perf_counter()
    dtype = dtype_name(dtype)
    check_format(quantize)
    check_cache_dtype(kv_cache_dtype)
    require_transformers()
    accelerator = get_accelerator()
    chosen = choose_dtype(accelerator, dtype)
    accelerator.reset_peak_memory_stats()

    ignored = tuple(ignore_extra)

    def load_in(chosen: torch.dtype) -> LoadedModel:
        adapter = find_adapter(model)
        if adapter is not None:
            with memory_errors(accelerator, f"the model {adapter.base}"):
                merged = adapter.load(chosen, trust_remote_code=trust_remote_code, ignore_extra=ignored)
                tokenizer = load_tokenizer(merged.tokenizer_folder, trust_remote_code)
                module = init_inference(merged.module, 1, chosen, quantize=quantize)
            seconds = time.perf_counter() - start - builds.seconds
            folder = adapter.folder
            return LoadedModel(module, tokenizer, folder, accelerator, chosen, seconds, builds.seconds)
        form = partial(gguf_form, dtype, quantize, chosen, accelerator.current_device_name())

        def find() -> FoundModel:
            return find_model(model, form, trust_remote_code=trust_remote_code)

        def load(found: FoundModel) -> tuple[Any, Tokenizer, Path]:
            module, tokenizer = _load_found(
                found, accelerator, chosen, quantize, trust_remote_code, ignored, dtype != "auto"
            )
            return module, tokenizer, found.folder

        module, tokenizer, folder = find_and_load(find, load, ModelRanks())
        accelerator.synchronize()
        seconds = time.perf_counter() - start - builds.seconds
        return LoadedModel(module, tokenizer, folder, accelerator, chosen, seconds, builds.seconds)

    import torch

    # transformers' loading fails in inference mode, and its weights could never be trained.
    with torch.inference_mode(False), watch_builds() as builds:
        loaded = load_in_finite_dtype(
            load_in, chosen, accelerator, ModelRanks(), is_asked_for=dtype != "auto"
        )
        loaded.module.kv_cache_dtype = kv_cache_dtype
        return loaded


def _load_found(
    found: FoundModel,
    accelerator: Accelerator,
    dtype: torch.dtype,
    quantize: str | None,
    trust_remote_code: bool,
    ignore_extra: tuple[str, ...],
    is_dtype_asked_for: bool,
) -> tuple[Any, Tokenizer]:
    from acclimate.llm.loading.packed_modules import use_few_row_kernels

    folder = found.folder
    with memory_errors(accelerator, f"the model {model_name(folder)}"):
        # The tokenizer comes first, because loading it takes much more memory than it keeps.
        tokenizer = load_tokenizer(folder, trust_remote_code)
        is_quantised = found.gguf is not None or quantization_settings(folder) is not None
        if is_quantised or quantize is not None:
            loader = SliceLoader(
                accelerator,
                ModelRanks(),
                dtype,
                trust_remote_code=trust_remote_code,
                ignore_extra=ignore_extra,
                quantize=quantize,
                is_dtype_asked_for=is_dtype_asked_for,
            )
            return loader.load(found), tokenizer
        module = _load_module(folder, dtype, trust_remote_code, ignore_extra).to(
            accelerator.current_device_name()
        )
        if has_kernels(accelerator.current_device_name()):
            use_few_row_kernels(module)
        return module, tokenizer


def _load_module(
    folder: Path, dtype: torch.dtype, trust_remote_code: bool, ignore_extra: tuple[str, ...]
) -> Any:
    from transformers import AutoModelForCausalLM

    from acclimate.llm.loading.inference_model import Whole, as_inference_model

    files = [OpenFile(path) for path in weight_files(folder)]
    totals = weight_totals(folder)

    with quiet_transformers(), explained_failures("load", folder):
        try:
            with bounded_model(totals):
                module, report = AutoModelForCausalLM.from_pretrained(
                    folder,
                    dtype=dtype,
                    local_files_only=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # check_report names them
                    trust_remote_code=trust_remote_code,
                )
        except (pickle.UnpicklingError, EOFError) as error:  # torch's message advises weights_only=False
            raise CorruptModelError(
                f"the .bin files in {folder} are damaged, or hold something other than tensors"
            ) from error
    check_report(folder, report, ignore_extra)
    made = as_inference_model(module.eval(), None, ModelRanks(), Whole.of(module, folder))
    made.mapped_files = mapped_files(module, files)
    for file in files:
        file.check_unchanged("loaded")
    return made
