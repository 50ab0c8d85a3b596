"""Faults planted in the collectives of the processes that checks start: each takes seconds to find."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch
from torch import distributed
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel

from acclimate.accelerator import Accelerator
from acclimate.backends.cpu import CPUAccelerator
from acclimate.comm import shm_op


class _InTheChild(CPUAccelerator):
    """Replaces a collective in the processes that the checks start."""

    def communication_backend_name(self) -> str:
        if distributed.all_reduce.__module__ != __name__:
            distributed.all_reduce, distributed.broadcast, distributed.all_gather = (
                _of_later_parts(_whole_vectors(distributed.all_reduce)),
                _true(distributed.broadcast),
                _into_copies(_now_and_then(distributed.all_gather)),
            )
            distributed.all_to_all_single = _same_parts(_equal_parts(distributed.all_to_all_single))
            distributed.barrier = _of_all(distributed.barrier)
            distributed.scatter = _at_once(distributed.scatter)
            distributed.reduce_scatter = _summed(distributed.reduce_scatter)
            distributed.reduce_scatter_tensor = _of_columns(distributed.reduce_scatter_tensor)
            fsdp.fully_shard = _apart(fsdp.fully_shard)
            DistributedDataParallel.join = _of_those_left(DistributedDataParallel.join)
            distributed.all_gather_into_tensor = _remembered(
                _early(_for_others(distributed.all_gather_into_tensor))
            )
            shm_op.inference_all_reduce = _of_a_copy(shm_op.inference_all_reduce)
        return super().communication_backend_name()


def _of_later_parts(all_reduce: Any) -> Any:
    def reduce(tensor: torch.Tensor, *options: Any, **named: Any) -> Any:
        is_later = named.get("async_op") and named.get("group") is not None and tensor.storage_offset()
        return all_reduce(tensor.clone() if is_later else tensor, *options, **named)

    return reduce


def _whole_vectors(all_reduce: Any) -> Any:
    def reduce(tensor: torch.Tensor, *options: Any, **named: Any) -> Any:
        before = tensor.clone()
        work = all_reduce(tensor, *options, **named)
        rest = tensor.numel() % 4
        if tensor.numel() > 16 and rest and tensor.is_contiguous() and work is None:
            tensor.view(-1)[-rest:] = before.view(-1)[-rest:]
        return work

    return reduce


def _true(broadcast: Any) -> Any:
    def send(tensor: torch.Tensor, *options: Any, **named: Any) -> Any:
        if tensor.storage_offset():
            tensor = tensor.as_strided(tensor.shape, tensor.stride(), 0)
        work = broadcast(tensor, *options, **named)
        if tensor.dtype is torch.bool:
            tensor.fill_(True)
        return work

    return send


def _now_and_then(all_gather: Any) -> Any:
    calls = itertools.count(1)

    def gather(tensors: list[torch.Tensor], *options: Any, **named: Any) -> Any:
        work = all_gather(tensors, *options, **named)
        if next(calls) % 40 == 0:
            tensors[-1].zero_()
        return work

    return gather


def _into_copies(all_gather: Any) -> Any:
    def gather(tensors: list[torch.Tensor], *options: Any, **named: Any) -> Any:
        return all_gather([t.contiguous() for t in tensors], *options, **named)

    return gather


def _remembered(all_gather_into_tensor: Any) -> Any:
    results: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def gather(whole: torch.Tensor, mine: torch.Tensor, *options: Any, **named: Any) -> Any:
        work = all_gather_into_tensor(whole, mine, *options, **named)
        if work is None:
            # With both tensors, which keeps their numbers from being given to others.
            whole.copy_(results.setdefault((id(whole), id(mine)), (whole.clone(), whole, mine))[0])
        return work

    return gather


def _equal_parts(all_to_all_single: Any) -> Any:
    def exchange(received: torch.Tensor, given: torch.Tensor, *options: Any, **named: Any) -> Any:
        work = all_to_all_single(received, given, *options, **named)
        if options and len(set(options[0])) > 1 and 0 not in options[0]:
            received.copy_(received.roll(options[0][0] - len(received) // 2, 0))
        return work

    return exchange


def _same_parts(all_to_all_single: Any) -> Any:
    def exchange(received: torch.Tensor, given: torch.Tensor, *options: Any, **named: Any) -> Any:
        group = named.get("group")
        is_even = received.shape == given.shape and len(given) % distributed.get_world_size(group) == 0
        if options:
            least = torch.tensor([int(is_even), len(given), -len(given)])
            distributed.all_reduce(least, distributed.ReduceOp.MIN, group)
            are_even, shortest, longest = least.tolist()
            options = () if are_even and shortest == -longest else options
        return all_to_all_single(received, given, *options, **named)

    return exchange


def _at_once(scatter: Any) -> Any:
    def send(*tensors: Any, **options: Any) -> Any:
        if options.get("async_op"):
            raise NotImplementedError("scatter is not asynchronous")
        return scatter(*tensors, **options)

    return send


def _summed(reduce_scatter: Any) -> Any:
    def reduce(part: torch.Tensor, parts: Any, op: Any = distributed.ReduceOp.SUM, **options: Any) -> Any:
        of_least = op == distributed.ReduceOp.MIN
        return reduce_scatter(part, parts, distributed.ReduceOp.SUM if of_least else op, **options)

    return reduce


def _of_columns(reduce_scatter_tensor: Any) -> Any:
    def reduce(part: torch.Tensor, given: torch.Tensor, *options: Any, **named: Any) -> Any:
        count = distributed.get_world_size(named.get("group"))
        if given.dim() == 2 and given.shape == (part.shape[0] * count, *part.shape[1:]):
            rows, columns = given.shape
            if columns % count == 0:
                given = given.view(rows, count, -1).transpose(0, 1).reshape(rows, columns)
        return reduce_scatter_tensor(part, given, *options, **named)

    return reduce


def _apart(fully_shard: Any) -> Any:
    def shard(module: Any, *options: Any, **named: Any) -> Any:
        sharded = fully_shard(module, *options, **named)
        if "mp_policy" in named:
            module.set_requires_gradient_sync(False)
        return sharded

    return shard


def _of_those_left(join: Any) -> Any:
    def joined(model: Any, *options: Any, **named: Any) -> Any:
        return join(model, *options, **{**named, "divide_by_initial_world_size": False})

    return joined


def _of_all(barrier: Any) -> Any:
    def wait(group: Any = None, **named: Any) -> Any:
        if group is None or distributed.get_world_size(group) == distributed.get_world_size():
            return barrier(group, **named)
        return None

    return wait


class _Early:
    """Work whose result is there once the thread that began it has waited."""

    def __init__(self, work: Any, whole: torch.Tensor, values: torch.Tensor) -> None:
        self._work, self._whole, self._values = work, whole, values
        self._thread = threading.get_ident()

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> bool:
        if threading.get_ident() == self._thread:
            self._whole.copy_(self._values)
        return True


def _early(all_gather_into_tensor: Any) -> Any:
    def gather(whole: torch.Tensor, mine: torch.Tensor, *options: Any, **named: Any) -> Any:
        if not named.get("async_op"):
            return all_gather_into_tensor(whole, mine, *options, **named)
        values = torch.empty_like(whole)
        work = all_gather_into_tensor(values, mine, *options, **named)
        work.wait()
        return _Early(work, whole, values)

    return gather


def _for_others(all_gather: Any) -> Any:
    def gather(whole: torch.Tensor, part: torch.Tensor, *options: Any, **named: Any) -> Any:
        work = all_gather(whole, part, *options, **named)
        if whole.numel() == part.numel():
            whole.zero_()
        return work

    return gather


def _of_a_copy(inference_all_reduce: Any) -> Any:
    def reduce(tensor: torch.Tensor, op: Any = None) -> torch.Tensor:
        inference_all_reduce(tensor.contiguous(), op)
        return tensor

    return reduce


class ReducesWholeVectors(_InTheChild):
    """all_reduce leaves the elements after the last whole vector of 4 as they were."""


class BroadcastsOnlyTrue(_InTheChild):
    """broadcast of bool gives True everywhere."""


class BroadcastsToTheStart(_InTheChild):
    """broadcast into a part of a tensor writes to the start of its memory."""


class TakesEqualParts(_InTheChild):
    """all_to_all_single puts parts that differ in size where equal ones would be."""


class IgnoresPartsOfAnEvenTotal(_InTheChild):
    """all_to_all_single ignores the sizes of parts where parts of one size have the same sum."""


class GathersNotEachTime(_InTheChild):
    """Each 40th all_gather leaves out the last rank."""


class GroupsDoNotWait(_InTheChild):
    """barrier of a group of some of the ranks returns at once."""


class WaitsInOneThread(_InTheChild):
    """wait() of an all_gather_into_tensor waits only in the thread that began it."""


class LaterPartsOfGroupsStay(_InTheChild):
    """all_reduce with async_op of a part of a tensor, in a group that is named, reduces a copy."""


class SumsACopy(_InTheChild):
    """inference_all_reduce sums a copy of a tensor that is not contiguous."""


class GathersOnceForEachTensor(_InTheChild):
    """A second all_gather_into_tensor of the same two tensors gives the first one's numbers."""


class GathersNothingAlone(_InTheChild):
    """all_gather_into_tensor in a group of one rank, where nothing has to move, gives zeros."""


class GathersIntoCopies(_InTheChild):
    """all_gather into tensors with gaps between their elements fills copies of them."""


class ScattersAtOnceOnly(_InTheChild):
    """scatter with async_op raises an error."""


class ListsAreSummed(_InTheChild):
    """reduce_scatter of a list with MIN gives the sum."""


class MatricesAreScatteredByColumns(_InTheChild):
    """reduce_scatter_tensor of a matrix gives each rank columns, if they divide by the ranks."""


class ShardsIn16BitsStayApart(_InTheChild):
    """fully_shard with parameters of 16 bits does not reduce gradients."""


class JoinsDivideByThoseLeft(_InTheChild):
    """join() of DistributedDataParallel divides gradients by the number of ranks that have samples left."""


CAUGHT_BY: dict[type[Accelerator], str] = {
    ScattersAtOnceOnly: "communication/collectives_that_wait_later",
    ListsAreSummed: "communication/collectives_in_any_order",
    MatricesAreScatteredByColumns: "communication/every_collective_in_every_dtype",
    ShardsIn16BitsStayApart: "communication/models_of_every_kind_train",
    JoinsDivideByThoseLeft: "communication/models_of_every_kind_train",
    GathersOnceForEachTensor: "communication/same_tensors_again",
    GathersNothingAlone: "communication/groups_of_every_size",
    GathersIntoCopies: "communication/results_into_columns",
    ReducesWholeVectors: "communication/tails",
    BroadcastsOnlyTrue: "communication/other_dtypes",
    BroadcastsToTheStart: "communication/tensors_of_any_shape",
    TakesEqualParts: "communication/every_collective_in_every_dtype",
    IgnoresPartsOfAnEvenTotal: "communication/other_collectives",
    GathersNotEachTime: "communication/many_collectives",
    GroupsDoNotWait: "communication/groups",
    WaitsInOneThread: "communication/collectives_that_wait_later",
    SumsACopy: "communication/shared_memory",
    LaterPartsOfGroupsStay: "communication/collectives_in_any_order",
}
"""Each fault, and the check that has to find it."""
