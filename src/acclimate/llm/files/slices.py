"""A rank's slices of a model's tensors: the source and the target of each; threads read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from acclimate.errors import CorruptModelError
from acclimate.host import huge_pages
from acclimate.llm.files.deferred_tensors import read_into, regions
from acclimate.llm.files.regions import Region
from acclimate.llm.kernels.torch_threads import one_thread

if TYPE_CHECKING:
    from acclimate.llm.split import Plan


_Part = TypeVar("_Part")

_MOST_THREADS = 8
"""More threads would wait for memory."""


def read_at_once(read: Callable[[_Part], None], parts: Sequence[_Part]) -> None:
    """Calls ``read`` with each of the parts, in as many threads as torch has; raises its error.

    Each thread fills memory of its own, which takes longest, and works on it while it is in the cache.
    """
    threads = min(len(parts), torch.get_num_threads(), _MOST_THREADS)
    if threads <= 1:
        for part in parts:
            read(part)
        return
    is_inference = torch.is_inference_mode_enabled()  # a thread does not inherit it

    def run(part: _Part) -> None:
        with torch.inference_mode(is_inference), one_thread():
            read(part)

    with ThreadPoolExecutor(threads, "read") as pool:
        try:
            for _ in pool.map(run, parts):
                pass
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_SUMMED = 1 << 20
"""The number of values that are checked at a time."""


@dataclass
class Slice:
    """One parameter or buffer of this rank."""

    name: str
    shard: torch.Tensor
    """The slice's values; a deferred tensor, unless the checkpoint is a pickle."""
    places: list[tuple[torch.nn.Module, str]] = field(default_factory=list)
    """The modules that hold it, each with its name there; several if it is tied."""

    def read(self, source: Path | str) -> torch.Tensor:
        """Returns the slice's values, on the CPU.

        Raises:
            CorruptModelError: a value is NaN; the message names the source.
        """
        values = torch.empty(self.shard.shape, dtype=self.shard.dtype)
        huge_pages.request(values)

        def read(region: Region) -> None:
            piece = values[tuple(slice(start, stop) for start, stop in region)]
            read_into(self.shard, region, piece)
            refuse_nan(piece, self.name, source)

        read_at_once(read, regions(self.shard))
        return values

    def load(self, folder: Path, device: str) -> None:
        """Reads the slice, and stores it in its modules."""
        values = self.read(folder)
        module, leaf = self.places[0]
        before = _tensors(module, leaf)[leaf]
        loaded: torch.Tensor = values.to(device)
        if isinstance(before, torch.nn.Parameter):
            loaded = torch.nn.Parameter(loaded, requires_grad=before.requires_grad)
            vars(loaded).update(vars(before))
        for module, leaf in self.places:
            _tensors(module, leaf)[leaf] = loaded


def slices(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], plan: Plan | None, rank: int
) -> list[Slice]:
    """Returns this rank's slices of the whole model's tensors, in the order of the files' tensors.

    ``model`` is split, with its parameters on the meta device; without a plan, nothing is.

    Raises:
        CorruptModelError: a tensor of the split model has no slice, or one of another shape.
    """
    from acclimate.llm.split import shard

    found: dict[int, Slice] = {}
    for name, whole in tensors.items():
        prefix, _, leaf = name.rpartition(".")
        module = model.get_submodule(prefix)
        local = _tensors(module, leaf).get(leaf)
        if local is None or not local.is_meta:  # this rank holds nothing of it, or zeros
            continue
        values = whole if plan is None or name not in plan.splits else shard(whole, plan.splits[name], rank)
        if tuple(values.shape) != tuple(local.shape):
            raise CorruptModelError(
                f"the plan gives rank {rank} {list(values.shape)} of {name}, and the split model has room "
                f"for {list(local.shape)}"
            )
        part = found.setdefault(id(local), Slice(name, values))
        part.places.append((module, leaf))
    return list(found.values())


def _tensors(module: torch.nn.Module, leaf: str) -> dict[str, Any]:
    return module._parameters if leaf in module._parameters else module._buffers


def refuse_nan(values: torch.Tensor, name: str, source: Path | str) -> None:
    """Raises an error if there is a NaN among a tensor's values.

    Raises:
        CorruptModelError: the message names the tensor and its source.
    """
    if _has_nan(values):
        raise CorruptModelError(
            f"the tensor {name} in {source} is corrupt: it contains values that are not numbers (NaN)"
        )


def _has_nan(tensor: torch.Tensor) -> bool:
    """Whether a tensor contains a NaN."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1 or prod(tensor.shape) == 0:
        return False
    # A sum is NaN if a summand is NaN, or if infinities of both signs meet. For bfloat16, a sum in the
    # tensor's dtype takes 1/30 of the time of one in float32, and torch accumulates in float32 anyway.
    pieces = tensor.reshape(-1).split(_SUMMED)
    return any(bool(torch.isnan(piece.sum())) and bool(torch.isnan(piece).any()) for piece in pieces)
