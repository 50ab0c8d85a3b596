"""Splits, quantises and loads a model: each rank reads only its own slices of a file's weights."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from acclimate.errors import CorruptModelError, UnsupportedModelError
from acclimate.llm.files.converted import model_name
from acclimate.llm.gguf.convert import BLOCKS
from acclimate.llm.loading.inference_model import Whole, as_inference_model
from acclimate.llm.loading.loaded_model import memory_errors
from acclimate.llm.loading.locate import FoundModel, find_and_load, find_model
from acclimate.llm.loading.packer import Packer, has_kernels
from acclimate.llm.progress import progress_bar
from acclimate.llm.published.settings import quantization_settings
from acclimate.llm.ranks import ModelRanks
from acclimate.selection import get_accelerator

if TYPE_CHECKING:
    import torch

    from acclimate.accelerator import Accelerator
    from acclimate.llm.split import Plan

Verify = bool | Literal["auto"]
"""The ``verify`` argument of :func:`acclimate.init_inference`."""


def split_loaded(
    model: Any,
    dtype: torch.dtype,
    accelerator: Accelerator,
    ranks: ModelRanks,
    quantize: str | None,
    user_plan: Mapping[str, Any] | None = None,
    verify: Verify = "auto",
) -> Any:
    """Splits and quantises a model that is loaded; see :func:`acclimate.init_inference`."""
    import torch

    with ranks.all_or_none():
        if not isinstance(model, torch.nn.Module):
            raise UnsupportedModelError(
                "model must be a folder, a .gguf file, a hub id or a transformers model, not an "
                f"object of type {type(model).__name__}"
            )
        _check_whole(model)
        whole = Whole.of(model)
        packer = Packer(quantize, f"the model {type(model).__name__}")
        packer.find_sensitive(model)
    made = _make_plan(model, ranks, user_plan, verify)
    with ranks.all_or_none(), memory_errors(accelerator, f"the model {type(model).__name__}"):
        if made is not None:
            model = _apply(model, made, ranks)
        device = accelerator.current_device_name()
        model = model.to(device=device, dtype=dtype)
        if quantize is not None:
            packer.pack_loaded(model, device)
    return _finished(model, made, ranks, whole, packer)


def _check_whole(model: torch.nn.Module) -> None:
    """Raises :class:`UnsupportedModelError` if a loaded model cannot be split or quantised any more."""
    from acclimate.llm.split.layers.intact import split_of

    split, packed = split_of(model), getattr(getattr(model, "packing", None), "packed", ())
    if split is None and not packed:
        return
    state = f"split over {split.size} ranks" if split is not None else f"quantised ({', '.join(packed)})"
    raise UnsupportedModelError(
        f"the model {type(model).__name__} is already {state}; give init_inference its folder to load it in "
        "another way"
    )


def _finished(model: Any, plan: Plan | None, ranks: ModelRanks, whole: Whole, packer: Packer) -> Any:
    """Turns a loaded model into an :class:`InferenceModel`."""
    from acclimate.llm.loading.packed_modules import use_few_row_kernels

    if has_kernels(get_accelerator().current_device_name()):
        use_few_row_kernels(model)
    made = as_inference_model(model.eval(), plan, ranks, whole)
    made.packing = packer
    return made


@dataclass(frozen=True)
class SliceLoader:
    """Loads a model from files; each rank reads only its own slices."""

    accelerator: Accelerator
    ranks: ModelRanks
    dtype: torch.dtype
    is_dtype_asked_for: bool
    """Whether the user asked for the dtype; if not, quantised weights may stay as they are in the files."""
    quantize: str | None = None
    trust_remote_code: bool = False
    ignore_extra: tuple[str, ...] = ()
    user_plan: Mapping[str, Any] | None = None
    verify: Verify = "auto"

    def from_files(
        self,
        model: str | os.PathLike[str] | None,
        *,
        with_tokenizer: bool = False,
        before: Callable[[Path], None] = lambda folder: None,
        load: Callable[[SliceLoader, FoundModel], Any] | None = None,
    ) -> Any:
        """Finds a model's files and loads them; converts a damaged folder in the cache again.

        Args:
            model: the ``model`` argument of :func:`acclimate.llm.load_model`.
            with_tokenizer: whether the model must have a tokenizer.
            before: called with the model's folder before any weight is read.
            load: loads what was found; ``None``: :meth:`load`.
        """

        def find() -> FoundModel:
            with self.ranks.all_or_none():
                return find_model(
                    model,
                    self._gguf_form,
                    trust_remote_code=self.trust_remote_code,
                    with_tokenizer=with_tokenizer,
                )

        def read(found: FoundModel) -> Any:
            with self.ranks.all_or_none():
                before(found.folder)
            return self.load(found) if load is None else load(self, found)

        return find_and_load(find, read, self.ranks)

    def _gguf_form(self) -> str:
        """Returns the form of a GGUF file: its own blocks, if the user asked for nothing else."""
        is_kept = not self.is_dtype_asked_for and self.quantize is None and self._has_kernels()
        return BLOCKS if is_kept else str(self.dtype).removeprefix("torch.")

    def _has_kernels(self) -> bool:
        return has_kernels(self.accelerator.current_device_name())

    def load(self, found: FoundModel) -> Any:
        """Loads a model whose files have been found and checked."""
        from acclimate.llm.loading.deferred_model import deferred_model

        folder = found.folder
        is_quantised = found.gguf is not None or quantization_settings(folder) is not None
        packer = Packer(
            self.quantize,
            str(found.gguf or folder),
            is_quantised and not self.is_dtype_asked_for and self._has_kernels(),
        )
        with contextlib.ExitStack() as opened:
            with self.ranks.all_or_none():
                model, files = opened.enter_context(
                    deferred_model(
                        found,
                        self.dtype,
                        trust_remote_code=self.trust_remote_code,
                        ignore_extra=self.ignore_extra,
                    )
                )
            self._check_same(folder, [file.identity for file in files])
            with self.ranks.all_or_none():
                whole = Whole.of(model, folder)
                packer.find_sensitive(model)
                tensors = _take_tensors(model)
            plan = _make_plan(model, self.ranks, self.user_plan, self.verify, is_kept=True)
            with self.ranks.all_or_none():
                if plan is not None:
                    model = _apply(model, plan, self.ranks)
            with self.ranks.all_or_none(), memory_errors(self.accelerator, f"the model {model_name(folder)}"):
                self._fill(folder, model, tensors, plan, packer)
                if self.ranks.is_first:
                    packer.tell()
                for file in files:
                    file.check_unchanged()
                model = model.to(self.accelerator.current_device_name())  # buffers that are not in the files
                self.accelerator.synchronize()
        return _finished(model, plan, self.ranks, whole, packer)

    def _check_same(self, folder: Path, own: list[Any]) -> None:
        """Raises :class:`CorruptModelError` on all ranks unless they read equal files."""
        first, *others = self.ranks.exchange(own)
        for rank, other in enumerate(others, 1):
            if other != first:
                raise CorruptModelError(
                    f"rank {rank} found other files in {folder} than rank 0: {_difference(first, other)}. "
                    "Give all ranks the same files"
                )

    def _fill(
        self,
        folder: Path,
        model: Any,
        tensors: Mapping[str, torch.Tensor],
        plan: Plan | None,
        packer: Packer,
    ) -> None:
        from acclimate.llm.files.slices import Slice, slices

        found: list[Slice] = slices(model, tensors, plan, self.ranks.rank)
        total = sum(prod(part.shard.shape) * part.shard.dtype.itemsize for part in found)
        device = self.accelerator.current_device_name()
        bar: Any = progress_bar(f"loading {model_name(folder)}", total if self.ranks.is_first else 0)
        advance: Callable[[int], None]
        with bar if self.ranks.is_first else contextlib.nullcontext(lambda done: None) as advance:
            for part in found:
                if not packer.pack(part, device):
                    part.load(folder, device)
                advance(prod(part.shard.shape) * part.shard.dtype.itemsize)


def _difference(first: list[Any], other: list[Any]) -> str:
    names = [pair[0] for pair in first], [pair[0] for pair in other]
    if names[0] != names[1]:
        return f"{', '.join(names[1]) or 'no safetensors files'} in place of {', '.join(names[0]) or 'none'}"
    return next(f"{mine[0]} differs" for mine, theirs in zip(first, other, strict=True) if mine != theirs)


def _take_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Returns a model's deferred tensors by name, and replaces them by empty ones on the meta device."""
    import torch

    from acclimate.llm.files.deferred_tensors import DeferredTensor

    taken: dict[str, torch.Tensor] = {}
    empty: dict[int, torch.Tensor] = {}  # tied parameters stay tied
    for prefix, module in model.named_modules(remove_duplicate=False):
        for kind in (module._parameters, module._buffers):
            for name, tensor in list(kind.items()):
                full = f"{prefix}.{name}" if prefix else name
                if id(tensor) in empty:
                    taken[full] = taken[_first_name(taken, tensor)]
                    kind[name] = empty[id(tensor)]
                elif isinstance(tensor, DeferredTensor):
                    taken[full] = tensor
                    shell: torch.Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    if kind is module._parameters:
                        shell = torch.nn.Parameter(shell, requires_grad=tensor.requires_grad)
                    kind[name] = empty[id(tensor)] = shell
    return taken


def _first_name(taken: Mapping[str, torch.Tensor], tensor: torch.Tensor) -> str:
    return next(name for name, argument in taken.items() if argument is tensor)


def _make_plan(
    model: Any, ranks: ModelRanks, user_plan: Mapping[str, Any] | None, verify: Verify, is_kept: bool = False
) -> Plan | None:
    """Returns the first rank's plan, which all ranks follow; ``None`` for one rank.

    If ``is_kept``, it is loaded from the cache or saved there.
    """
    if ranks.size == 1:
        return None
    from acclimate.llm.split.planning.make_plan import make_plan
    from acclimate.llm.split.saved_plans import load_plan, plan_key, save_plan

    plan = None
    with ranks.all_or_none():
        if ranks.is_first and is_kept and verify == "auto":
            key = plan_key(model, ranks.size, user_plan)
            plan = load_plan(key)
            if plan is None:
                plan = make_plan(model, ranks.size, user_plan)
                save_plan(key, plan)
        elif ranks.is_first:
            plan = make_plan(model, ranks.size, user_plan, verify=verify)
    made: Plan = ranks.from_first(plan)
    return made


def _apply(model: Any, plan: Plan, ranks: ModelRanks) -> Any:
    from acclimate.llm.split import apply_plan

    return apply_plan(model, plan, ranks.group)
