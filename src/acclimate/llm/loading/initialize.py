"""``init_inference``: loads a transformers model on the accelerator, split over the job's ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from acclimate.llm.loading.adapter import find_adapter
from acclimate.llm.loading.finite_dtype import load_in_finite_dtype
from acclimate.llm.loading.loaded_model import choose_dtype, dtype_name, require_transformers
from acclimate.llm.loading.packer import check_cache_dtype, check_format
from acclimate.llm.loading.slice_loader import SliceLoader, Verify, split_loaded
from acclimate.llm.ranks import join_model_ranks
from acclimate.selection import get_accelerator

if TYPE_CHECKING:
    import torch

    from acclimate.accelerator import Accelerator


def init_inference(
    model: Any,
    tp_size: int | None = None,
    dtype: Any = "auto",
    verify: Verify = "auto",
    *,
    plan: Mapping[str, Any] | None = None,
    quantize: str | None = None,
    kv_cache_dtype: str = "auto",
    compile: bool | Mapping[str, Any] = False,
    trust_remote_code: bool = False,
    ignore_extra: Iterable[str] = (),
) -> Any:
    """Returns a transformers model that runs on this process's accelerator, split over the job's ranks.

    Every rank must make the same call, and later the same calls of ``generate``. If ``model`` is not yet
    loaded, each rank reads only its own slices of the weights. An error on one rank is raised on all ranks.

    Args:
        model: a folder, a ``.gguf`` file, the id of a model on the Hugging Face hub, or a transformers model,
            which is split in place and returned. The folder of a PEFT adapter stands for its base model, into
            which it is merged.
        tp_size: the number of ranks that share the model; ``None``: all ranks of the job.
        dtype: ``bfloat16``, ``float16``, ``float32``, or ``auto``: the first of these that the accelerator
            supports, or the model's own dtype if it is already loaded.
        verify: whether to run blocks whole and split, and compare the results; ``auto`` does so unless all
            splits come from the model's published plan.
        plan: maps patterns of module names to splits; other modules are split by the model's own plan or by
            its structure.
        quantize: ``int8`` or ``int4``: the format in which the weights of linear modules and embeddings are
            stored; each weight is packed as soon as it is read. ``None`` keeps the model's format; a GGUF
            file's blocks stay as they are unless ``dtype`` names a dtype.
        kv_cache_dtype: ``int8`` stores the keys and values of texts in 8.5 bits a number, ``auto`` in the
            dtype that the model computes in. It applies to the texts that acclimate's own loop writes.
        compile: whether to run the model through ``torch.compile``; a mapping gives its options. If
            ``generate`` has a native step, it uses that instead, because it is faster.
        trust_remote_code: whether Python code that comes with the model may run.
        ignore_extra: patterns, such as ``v_head.*``, of tensors in the files that the model does not use.

    Raises:
        PlanError: the model cannot be split as asked; no weight has been read.
        InvalidRankError: ``tp_size`` does not divide the job's number of ranks.
        CorruptModelError: a tensor is missing, superfluous, of another shape, or damaged; the message names
            it.
        AcclimateError: the errors of :func:`acclimate.llm.load_model`.
    """
    check_format(quantize)
    check_cache_dtype(kv_cache_dtype)
    require_transformers()
    import torch

    if isinstance(dtype, str):
        dtype = dtype_name(dtype)
    # Weights created in inference mode could never be trained.
    with torch.inference_mode(False):
        made = _initialized(
            model, tp_size, dtype, verify, plan, quantize, trust_remote_code, tuple(ignore_extra)
        )
        if compile is not False:
            made.compile(**({} if compile is True else compile))
        made.kv_cache_dtype = kv_cache_dtype
        return made


def _initialized(
    model: Any,
    tp_size: int | None,
    dtype: Any,
    verify: Verify,
    plan: Mapping[str, Any] | None,
    quantize: str | None,
    trust_remote_code: bool,
    ignore_extra: tuple[str, ...],
) -> Any:
    accelerator = get_accelerator()
    ranks = join_model_ranks(accelerator, tp_size)
    with ranks.all_or_none():
        chosen = _dtype(accelerator, dtype, model)
        adapter = find_adapter(model)
        if adapter is not None:
            model, _ = adapter.load(chosen, trust_remote_code=trust_remote_code, ignore_extra=ignore_extra)
    if not isinstance(model, (str, os.PathLike)):
        return split_loaded(model, chosen, accelerator, ranks, quantize, plan, verify)

    def load_in(chosen: torch.dtype) -> Any:
        loader = SliceLoader(
            accelerator,
            ranks,
            chosen,
            is_dtype_asked_for=str(dtype) != "auto",
            quantize=quantize,
            trust_remote_code=trust_remote_code,
            ignore_extra=ignore_extra,
            user_plan=plan,
            verify=verify,
        )
        return loader.from_files(model)

    return load_in_finite_dtype(load_in, chosen, accelerator, ranks, is_asked_for=str(dtype) != "auto")


def _dtype(accelerator: Accelerator, dtype: Any, model: Any) -> torch.dtype:
    import torch

    name = dtype_name(str(dtype).removeprefix("torch."))
    if name == "auto" and isinstance(model, torch.nn.Module):
        own = getattr(model, "dtype", None) or next(model.parameters()).dtype
        name = str(own).removeprefix("torch.")
    return choose_dtype(accelerator, name)
