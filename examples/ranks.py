"""One model over several ranks: this process's rank, the split of the model, and agreement between ranks.

torchrun, ``acclimate run`` and most schedulers set the same variables for a rank.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from acclimate import Accelerator
from acclimate.llm.split import Plan, apply_plan, clip_grad_norm, make_plan

RANK = int(os.environ.get("RANK", "0"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

T = TypeVar("T")


def join_ranks(acc: Accelerator) -> None:
    """Selects this rank's device, and creates the process group."""
    acc.set_device(LOCAL_RANK % acc.device_count())  # a launcher may show each rank only its own device
    if WORLD_SIZE > 1:
        dist.init_process_group(acc.communication_backend_name())


def leave_ranks() -> None:
    """Destroys the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


WAYS = ("ddp", "fsdp2", "tp", "tp+ddp", "tp+fsdp2")


def ranks_of_a_copy(parallel: str, tensor_ranks: int | None) -> int:
    """The number of ranks that share the tensors of one copy of the model, and therefore its samples."""
    if not parallel.startswith("tp"):
        return 1
    return tensor_ranks or (WORLD_SIZE if parallel == "tp" else min(2, WORLD_SIZE))


@dataclass
class SpreadModel:
    """The model as this rank holds it."""

    module: nn.Module
    copies: int = 1
    """The number of copies of the model; each gets its own samples."""
    copy: int = 0
    """The number of the copy that this rank has, or has a part of."""
    plan: Plan | None = None
    """How the tensors of a copy are split over ranks; ``None``: they are not."""
    sharers: Any = None
    """The ranks that the tensors are split over."""

    def clip_grad_norm(self, largest: float) -> float:
        """Clips the norm of the whole model's gradients to ``largest``; returns the norm before that."""
        if self.plan is not None:
            return clip_grad_norm(self.module, self.plan, self.sharers, largest).item()
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), largest)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def spread(model: nn.Module, acc: Accelerator, parallel: str, tensor_ranks: int | None) -> SpreadModel:
    """Gives this rank the whole model (``ddp``), shards (``fsdp2``), or parts of its layers (``tp``)."""
    if WORLD_SIZE == 1:
        return SpreadModel(model)
    size = ranks_of_a_copy(parallel, tensor_ranks)
    mesh = init_device_mesh(acc.device_type, (WORLD_SIZE // size, size), mesh_dim_names=("data", "tensor"))
    found = SpreadModel(model, mesh["data"].size(), mesh["data"].get_local_rank())
    if size > 1:
        found.plan, found.sharers = make_plan(model, size), mesh["tensor"].get_group()
        apply_plan(model, found.plan, found.sharers)
    if parallel.endswith("fsdp2"):
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    elif found.copies > 1:
        found.module = DistributedDataParallel(model, process_group=mesh["data"].get_group())
    return found


@contextlib.contextmanager
def gradient_sync(model: nn.Module, wanted: bool) -> Iterator[None]:
    """A block in which a backward pass averages gradients over the ranks only if ``wanted``."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
    if isinstance(model, DistributedDataParallel) and not wanted:
        with model.no_sync():
            yield
    else:
        yield


def mean_over_ranks(value: Tensor) -> float:
    """The mean of a scalar over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value.item() / WORLD_SIZE


def any_rank(flag: int, device: str) -> int:
    """The largest of all ranks' flags, so that all ranks act alike."""
    if not dist.is_initialized():
        return flag
    flags = torch.tensor(flag, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return int(flags.item())


def from_rank_0(make: Callable[[], T]) -> T:
    """Calls ``make`` on rank 0; returns its result, or raises its error, on all ranks."""
    told: list[Any] = [None, None]
    if RANK == 0:
        try:
            told[0] = make()
        except RuntimeError as error:
            told[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(told)
    if told[1] is not None:
        raise told[1]
    result: T = told[0]
    return result
