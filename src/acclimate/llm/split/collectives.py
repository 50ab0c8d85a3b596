"""The ranks of a split model, processes or threads, and its collectives, with their gradients."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, Union

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# torch 2.13 renamed this method and warns at each use of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_wait = operator.methodcaller("wait")


class Ranks(Protocol):
    """The ranks that a model is split over."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums a contiguous tensor over the ranks, in place, and returns it."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns each rank's tensor, all of one shape, stacked along a new first dimension."""


class ProcessRanks:
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums a contiguous tensor over the ranks, in place, and returns it."""
        # The group's own method, because dist.all_reduce adds as much time as a one-token sum takes. Python
        # handles signals between two calls, and a handler that raises there would skip the wait: the group
        # would write to the tensor's memory later, which native code may have freed. Within map it does not.
        next(map(_wait, map(self.group.allreduce, ([tensor],))))
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns each rank's tensor, all of one shape, stacked along a new first dimension."""
        found = tensor.new_empty(self.size, *tensor.shape)
        _all_gather(found.view(-1), tensor.contiguous().view(-1), group=self.group)
        return found


Group: TypeAlias = Union[dist.ProcessGroup, "DeviceMesh", Ranks]
"""The ranks of a split: a process group, a ``DeviceMesh`` with one dimension, or :class:`Ranks`."""


def ranks_of(group: Group) -> Ranks:
    """Returns the ranks of a process group or of a mesh with one dimension."""
    if isinstance(group, dist.ProcessGroup):
        return ProcessRanks(group)
    if hasattr(group, "get_group"):
        return ProcessRanks(group.get_group())
    return group


class _Copy(torch.autograd.Function):
    """Identity in forward; sums the ranks' gradients in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.all_reduce(gradients[0].clone(memory_format=torch.contiguous_format)), None


class _Sum(torch.autograd.Function):
    """Sums the ranks' tensors in forward; identity in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        return ranks.all_reduce(tensor.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    """Concatenates the ranks' columns in forward; takes the rank's part of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks, lengths: list[int]) -> Tensor:
        ctx.start, ctx.length = sum(lengths[: ranks.rank]), lengths[ranks.rank]
        longest = max(lengths)
        padded = torch.nn.functional.pad(tensor, (0, longest - tensor.shape[-1]))
        found = ranks.all_gather(padded.contiguous())
        return torch.cat([shard[..., :length] for shard, length in zip(found, lengths, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].narrow(-1, ctx.start, ctx.length), None, None


def copy_to_ranks(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Returns the tensor, which all ranks have whole; backward sums its gradient over the ranks."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Copy.apply(tensor, ranks)  # type: ignore[no-any-return, no-untyped-call]
    return tensor


def sum_over_ranks(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Returns the sum of the ranks' tensors; may overwrite the given tensor."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Sum.apply(tensor, ranks)  # type: ignore[no-any-return, no-untyped-call]
    return ranks.all_reduce(tensor.contiguous())


def gather_columns(tensor: Tensor, ranks: Ranks, lengths: list[int]) -> Tensor:
    """Returns the ranks' columns, concatenated in rank order."""
    return _Gather.apply(tensor, ranks, lengths)  # type: ignore[no-any-return, no-untyped-call]


TIMEOUT_S = 300.0


class ThreadRanks:
    """One rank's view of ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list[Tensor | None]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._slots = barrier, slots

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the ranks, in place, and returns it."""
        with torch.no_grad():
            return tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns each rank's tensor, stacked along a new first dimension."""
        with torch.no_grad():
            return torch.stack(self._exchange(tensor))

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._slots[self.rank] = tensor
        self._barrier.wait()
        found = [slot.clone() for slot in self._slots if slot is not None]
        self._barrier.wait()
        return found


def on_threads(size: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Runs a function on each of ``size`` thread ranks; returns the results, or raises the first error."""
    barrier = threading.Barrier(size, timeout=TIMEOUT_S)
    slots: list[Tensor | None] = [None] * size
    found: list[Any] = [None] * size
    errors: list[BaseException] = []
    grad = torch.is_grad_enabled()

    def run(rank: int) -> None:
        try:
            with torch.set_grad_enabled(grad):
                found[rank] = work(ThreadRanks(rank, size, barrier, slots))
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return found
