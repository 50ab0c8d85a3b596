"""One model over several ranks: who this process is, how the model is spread, and what ranks agree on.

torchrun, ``acclimate run`` and most schedulers tell a rank who it is by the same variables.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from acclimate import Accelerator

RANK = int(os.environ.get("RANK", "0"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

T = TypeVar("T")


def join_ranks(acc: Accelerator) -> None:
    """Takes this rank's device, and finds the other ranks."""
    acc.set_device(LOCAL_RANK % acc.device_count())  # a launcher may show each rank only its own device
    if WORLD_SIZE > 1:
        dist.init_process_group(acc.communication_backend_name())


def leave_ranks() -> None:
    """Ends what :func:`join_ranks` began."""
    if dist.is_initialized():
        dist.destroy_process_group()


def spread(model: nn.Module, acc: Accelerator, parallel: str) -> nn.Module:
    """The model as this rank holds it: whole (``ddp``), or its shard of it (``fsdp2``)."""
    if WORLD_SIZE == 1:
        return model
    if parallel == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(acc.device_type, (WORLD_SIZE,))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@contextlib.contextmanager
def gradient_sync(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Whether a backward pass within averages gradients over the ranks."""
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
    """The largest of all ranks' flags, so that all of them do the same."""
    if not dist.is_initialized():
        return flag
    flags = torch.tensor(flag, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return int(flags.item())


def from_rank_0(make: Callable[[], T]) -> T:
    """What ``make`` returns, or raises, on rank 0."""
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
