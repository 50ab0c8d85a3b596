"""Topics of ranks: collectives with their options, groups by their own ranks, and time-outs."""

from __future__ import annotations

import pkgutil
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import combinations, product
from typing import Any

import torch
from torch import distributed

from acclimate.imports import describe
from acclimate_conformance.checks.assertions import in_thread, is_host, short
from acclimate_conformance.checks.communication.observer import Observer

_LENGTHS = (1, 5, 34)
_MANY = 60
SLOW_RANK_S = 0.2
_GROUP_TIMEOUT_S, _SHORT_TIMEOUT_S, _LATEST_S = 5.0, 3.0, 30.0
_LONG = 1 << 18


def _numbers(here: Observer, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers of a rank, on the host; other ones for each rank."""
    count = int(torch.Size(shape).numel())
    return ((torch.arange(count) * (rank + 2) + 3 * rank) % 11 + 1).reshape(shape).to(dtype)


def _there(here: Observer, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(here.accelerator.current_device_name())


def every_collective_in_every_dtype(here: Observer) -> None:
    """Those that move or reduce parts, to and from each rank."""
    dtypes = dict.fromkeys(
        (*here.accelerator.supported_dtypes(), torch.int64, torch.int32, torch.uint8, torch.int8)
    )
    for dtype in dtypes:
        for (name, collective), length in product(_COLLECTIVES.items(), _LENGTHS):
            _form(here, name, collective, length, dtype)


def _all_reduce(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    all_ranks = torch.stack([_numbers(here, r, 2, length, dtype=dtype) for r in here.ranks])
    for operation, name in ((distributed.ReduceOp.SUM, "sum"), (distributed.ReduceOp.MAX, "amax"),
                            (distributed.ReduceOp.MIN, "amin")):  # fmt: skip
        reduced = _there(here, all_ranks[here.place].clone())
        distributed.all_reduce(reduced, op=operation, group=here.group)
        here.same(reduced, getattr(all_ranks.double(), name)(0).to(dtype), f"{what} with {name}")


def average(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    """Of integers it is truncated, as the division of a sum in C is."""
    rows = [_numbers(here, r, 2, length, dtype=dtype) for r in here.ranks]
    reduced = _there(here, rows[here.place].clone())
    distributed.all_reduce(reduced, op=distributed.ReduceOp.AVG, group=here.group)
    total = torch.stack(rows).to(torch.int64).sum(0)
    if dtype.is_floating_point:
        wanted = total.double() / here.count
        apart = float((reduced.cpu().double() - wanted).abs().max())
        here.holds(apart <= 16 * torch.finfo(dtype).eps, f"{what} is off by {apart:.1e}")
    else:
        here.same(reduced, (total // here.count).to(dtype), what)


def _broadcast(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    for root in here.ranks:
        sent = _there(here, _numbers(here, here.number, 2, length, dtype=dtype))
        distributed.broadcast(sent, root, group=here.group)
        here.same(sent, _numbers(here, root, 2, length, dtype=dtype), f"{what} from rank {root}")


def _all_gather(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    mine = _there(here, _numbers(here, here.number, 2, length, dtype=dtype))
    gathered = [torch.zeros_like(mine) for _ in here.ranks]
    distributed.all_gather(gathered, mine, group=here.group)
    for r, part in zip(here.ranks, gathered, strict=True):
        here.same(part, _numbers(here, r, 2, length, dtype=dtype), f"the part of rank {r} of an {what}")


def _reduce(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    for root in here.ranks:
        for operation, name in ((distributed.ReduceOp.SUM, "sum"), (distributed.ReduceOp.MAX, "amax")):
            reduced = _there(here, _numbers(here, here.number, length, dtype=dtype))
            distributed.reduce(reduced, root, op=operation, group=here.group)
            if here.number == root:
                all_ranks = torch.stack([_numbers(here, r, length, dtype=dtype) for r in here.ranks])
                wanted = getattr(all_ranks.double(), name)(0)
                here.same(reduced, wanted.to(dtype), f"{what} with {name} to rank {root}")


def _gather(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    for root in here.ranks:
        mine = _there(here, _numbers(here, here.number, 2, length, dtype=dtype))
        parts = [torch.zeros_like(mine) for _ in here.ranks] if here.number == root else None
        distributed.gather(mine, parts, root, group=here.group)
        for r, part in zip(here.ranks, parts or (), strict=False):
            wanted = _numbers(here, r, 2, length, dtype=dtype)
            here.same(part, wanted, f"the part of rank {r} of a {what} to rank {root}")


def _scatter(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    for root in here.ranks:
        received = _there(here, torch.zeros(2, length, dtype=dtype))
        whole = [_there(here, _numbers(here, r + root, 2, length, dtype=dtype)) for r in here.ranks]
        distributed.scatter(received, whole if here.number == root else None, root, group=here.group)
        here.same(
            received, _numbers(here, here.number + root, 2, length, dtype=dtype), f"{what} from rank {root}"
        )


def _reduce_scatter(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    for rows, name in ((True, "sum"), (False, "sum"), (False, "amax")):
        operation = distributed.ReduceOp.SUM if name == "sum" else distributed.ReduceOp.MAX
        columns = (2 * here.count,) if rows else ()  # which would fit as many parts as the rows
        given = _there(here, _numbers(here, here.number, here.count * length, *columns, dtype=dtype))
        part = torch.zeros(length, *columns, dtype=dtype, device=given.device)
        distributed.reduce_scatter_tensor(part, given, op=operation, group=here.group)
        every = torch.stack(
            [_numbers(here, r, here.count * length, *columns, dtype=dtype) for r in here.ranks]
        )
        wanted = getattr(every.double(), name)(0).to(dtype)[here.place * length :][:length]
        here.same(part, wanted, f"{what} with {name}{', of matrices' if rows else ''}")


def _all_gather_matrices(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    mine = _there(here, _numbers(here, here.number, 2, length, dtype=dtype))
    whole = torch.zeros(2 * here.count, length, dtype=dtype, device=mine.device)
    distributed.all_gather_into_tensor(whole, mine, group=here.group)
    wanted = torch.cat([_numbers(here, r, 2, length, dtype=dtype) for r in here.ranks])
    here.same(whole, wanted, f"{what}, of matrices")


def _all_to_all(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    places = range(here.count)
    for first, second in ((1, 0), (0, 2), (2, 3), (3, 1)):
        # From place s to place r: equal and unequal parts, also of no rows, both sent and received.
        sizes = [[(length + first * r + second * s) % 5 for r in places] for s in places]
        mine = sizes[here.place]
        given = _there(here, _numbers(here, here.number, sum(mine), 2, dtype=dtype))
        takes = [sizes[s][here.place] for s in places]
        received = torch.zeros(sum(takes), 2, dtype=dtype, device=given.device)
        distributed.all_to_all_single(received, given, takes, mine, group=here.group)
        parts = []
        for s, rank in enumerate(here.ranks):
            start = sum(sizes[s][: here.place])
            parts.append(_numbers(here, rank, sum(sizes[s]), 2, dtype=dtype)[start : start + takes[s]])
        here.same(received, torch.cat(parts), f"{what} with parts of {takes} rows")


def _send(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    """Each rank sends to the next, the first rank first."""
    if here.count < 2:
        return
    after, before = (here.ranks[(here.place + step) % here.count] for step in (1, -1))
    mine = _there(here, _numbers(here, here.number, length, 2, dtype=dtype))
    received = torch.zeros_like(mine)
    operations = [
        distributed.P2POp(distributed.isend, mine, after, here.group),
        distributed.P2POp(distributed.irecv, received, before, here.group),
    ]
    for work in distributed.batch_isend_irecv(operations):
        work.wait()
    here.accelerator.synchronize()
    here.same(received, _numbers(here, before, length, 2, dtype=dtype), f"{what} from rank {before}")


def _form(
    here: Observer, name: str, call: _Collective, length: int, dtype: torch.dtype, of: str = ""
) -> None:
    """Runs a collective, which a backend may lack in all its forms, but not for one length or group."""
    what = f"{name} of {length} elements of {short(dtype)}{of}"
    here.form(f"{name} of {short(dtype)}", what, lambda: call(here, length, dtype, what))


_Collective = Callable[[Observer, int, torch.dtype, str], None]
_COLLECTIVES: dict[str, _Collective] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_gather_into_tensor": _all_gather_matrices,
    "all_to_all_single": _all_to_all,
    "batch_isend_irecv": _send,
}


def in_a_group(here: Observer, group: Any, ranks: Sequence[int], of: str) -> None:
    """Each collective, of a group that this process is in, and a barrier that waits for each of its ranks."""
    member = here.within(group, ranks)
    for dtype in (torch.float32, torch.int64):
        for name, collective in _COLLECTIVES.items():
            _form(member, name, collective, 5, dtype, f" {of}")
    for slow in ranks:
        arrived = here.folder / f"rank {slow} reached the barrier {of}"
        if here.number == slow:
            time.sleep(SLOW_RANK_S)
            arrived.touch()
        distributed.barrier(group=group)
        here.accelerator.synchronize()
        here.holds(arrived.exists(), f"barrier() {of} returns before rank {slow} reached it")
    distributed.barrier(group=group)


def many_collectives(here: Observer) -> None:
    """Each of many collectives in a row is right, with other numbers each time."""
    total = sum(r + 1 for r in here.ranks)
    for turn in range(1, _MANY + 1):
        reduced, sent = here.tensor(*[(here.number + 1.0) * turn] * 3), here.tensor(here.number + turn)
        gathered = [here.tensor(0) for _ in here.ranks]
        distributed.all_reduce(reduced, async_op=True).wait() if turn % 3 == 0 else distributed.all_reduce(
            reduced
        )
        distributed.broadcast(sent, turn % here.count)
        distributed.all_gather(gathered, here.tensor(here.number - turn))
        here.same(reduced, [float(total * turn)] * 3, f"all_reduce {turn} of {_MANY}")
        here.same(sent, [float(turn % here.count + turn)], f"broadcast {turn} of {_MANY}")
        here.same(torch.cat(gathered), [float(r - turn) for r in here.ranks], f"all_gather {turn} of {_MANY}")
    for (name, collective), turn in product(_COLLECTIVES.items(), range(1, _MANY // 3 + 1)):
        _form(here, name, collective, 3 + turn % 2, torch.float32, f", in call {turn} of {_MANY // 3},")


_Begun = tuple[Any, list[torch.Tensor], torch.Tensor]
"""A collective's work, the tensors that it fills, and what these then hold."""


def collectives_that_wait_later(here: Observer) -> None:
    """Each collective with ``async_op`` returns work; after ``wait()`` its result is there, in any thread."""
    _waited_for(here, "")


def _waited_for(here: Observer, of: str) -> None:
    """Each collective of the observer's group, which ``of`` tells."""
    index = here.accelerator.current_device()

    def waited(work: Any) -> None:
        work.wait()
        here.accelerator.synchronize()

    def elsewhere(work: Any) -> None:
        here.accelerator.set_device(index)  # a new thread may begin on another device
        waited(work)

    here.form("barrier of float32", f"barrier{of}", lambda: distributed.barrier(group=here.group))
    for name, call in _begun(here).items():

        def run(name: str = name, call: Callable[[], _Begun] = call) -> None:
            for where in ("", " in another thread"):
                work, filled, wanted = call()
                here.holds(work is not None, f"{name} with async_op=True{of} returns nothing to wait for")
                if work is None:
                    return
                in_thread(lambda work=work: elsewhere(work)) if where else waited(work)  # type: ignore[misc]
                here.same(torch.cat(filled), wanted, f"{name} with async_op{of}, after wait(){where},")

        here.form(f"{name} of float32", f"{name} with async_op=True{of}", run)


def _begun(here: Observer) -> dict[str, Callable[[], _Begun]]:
    """Calls of collectives of the observer's group."""
    device = here.accelerator.current_device_name()
    group, root, total = here.group, here.ranks[-1], sum(r + 1 for r in here.ranks)
    is_root = here.number == root

    def mine(length: int = 3) -> torch.Tensor:
        return torch.full((length,), here.number + 1.0, device=device)

    def zeros(length: int = 3) -> torch.Tensor:
        return torch.zeros(length, device=device)

    ones = torch.ones(3)
    every = torch.cat([ones * (r + 1) for r in here.ranks])

    def all_reduce() -> _Begun:
        reduced = mine()
        return distributed.all_reduce(reduced, group=group, async_op=True), [reduced], ones * total

    def reduce() -> _Begun:
        reduced = mine()
        work = distributed.reduce(reduced, root, group=group, async_op=True)
        return work, [reduced] if is_root else [ones], ones * total if is_root else ones

    def all_gather() -> _Begun:
        gathered = [zeros() for _ in here.ranks]
        return distributed.all_gather(gathered, mine(), group=group, async_op=True), gathered, every

    def all_gather_into_tensor() -> _Begun:
        whole = zeros(3 * here.count)
        work = distributed.all_gather_into_tensor(whole, mine(), group=group, async_op=True)
        return work, [whole], every

    def reduce_scatter_tensor() -> _Begun:
        part = zeros()
        work = distributed.reduce_scatter_tensor(part, mine(3 * here.count), group=group, async_op=True)
        return work, [part], ones * total

    def gather() -> _Begun:
        parts = [zeros() for _ in here.ranks] if is_root else None
        work = distributed.gather(mine(), parts, root, group=group, async_op=True)
        return work, parts or [every], every

    def scatter() -> _Begun:
        part = zeros()
        given = [mine() * (n + 1) for n in range(here.count)] if is_root else None
        work = distributed.scatter(part, given, root, group=group, async_op=True)
        return work, [part], ones * (root + 1) * (here.place + 1)

    def all_to_all_single() -> _Begun:
        exchanged = zeros(here.count)
        work = distributed.all_to_all_single(exchanged, mine(here.count), group=group, async_op=True)
        return work, [exchanged], torch.tensor([r + 1.0 for r in here.ranks])

    def broadcast() -> _Begun:
        sent = mine()
        return distributed.broadcast(sent, root, group=group, async_op=True), [sent], ones * (root + 1)

    def barrier() -> _Begun:
        return distributed.barrier(group=group, async_op=True), [ones], ones

    return {
        "all_reduce": all_reduce, "reduce": reduce, "all_gather": all_gather,
        "all_gather_into_tensor": all_gather_into_tensor, "reduce_scatter_tensor": reduce_scatter_tensor,
        "gather": gather, "scatter": scatter, "all_to_all_single": all_to_all_single,
        "broadcast": broadcast, "barrier": barrier,
    }  # fmt: skip


def groups_of_every_size(here: Observer) -> None:
    """Each collective in each form, in groups of one rank, of some and of all."""
    sizes = range(1, here.count + 1)
    for members in (list(some) for size in sizes for some in combinations(here.ranks, size)):
        group = distributed.new_group(members)  # a collective of all ranks
        if here.number in members:
            of = f" in a group of the ranks {members}"
            member = here.within(group, members)
            for dtype in (torch.float32, torch.int64):
                for name, collective in {**_COLLECTIVES, **_IN_LISTS}.items():
                    _form(member, name, collective, 7, dtype, of)
            _waited_for(member, of)
            for what, call in _OF_GROUPS.items():

                def observe(
                    call: Callable[[Observer, str], None] = call, member: Observer = member, of: str = of
                ) -> None:
                    call(member, of)

                here.optional(f"{what}{of}", observe)
            distributed.barrier(group=group)
            distributed.destroy_process_group(group)
    distributed.barrier()


def _all_to_all_lists(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    mine = [_there(here, _numbers(here, here.number + n, length, dtype=dtype)) for n in range(here.count)]
    received = [torch.zeros_like(part) for part in mine]
    distributed.all_to_all(received, mine, group=here.group)
    for r, part in zip(here.ranks, received, strict=True):
        wanted = _numbers(here, r + here.place, length, dtype=dtype)
        here.same(part, wanted, f"the part of rank {r} of an {what}")


def _reduce_scatter_lists(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    given = [_there(here, _numbers(here, here.number + n, length, dtype=dtype)) for n in range(here.count)]
    part = torch.zeros_like(given[0])
    distributed.reduce_scatter(part, given, group=here.group)
    every = torch.stack([_numbers(here, r + here.place, length, dtype=dtype) for r in here.ranks])
    here.same(part, every.double().sum(0).to(dtype), what)


def _all_gather_in_place(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    """The rank's own part is where it belongs already."""
    whole = torch.zeros(here.count * length, dtype=dtype, device=here.accelerator.current_device_name())
    own = whole[here.place * length :][:length]
    own.copy_(_numbers(here, here.number, length, dtype=dtype))
    distributed.all_gather_into_tensor(whole, own, group=here.group)
    wanted = torch.cat([_numbers(here, r, length, dtype=dtype) for r in here.ranks])
    here.same(whole, wanted, f"{what}, whose own part is in place,")


def _reduced_in_other_ways(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    rows = torch.stack([_numbers(here, r, length, dtype=dtype) for r in here.ranks])
    for operation, wanted in (
        (distributed.ReduceOp.PRODUCT, rows.double().prod(0)), (distributed.ReduceOp.MIN, rows.amin(0)),
    ):  # fmt: skip
        reduced = _there(here, rows[here.place].clone())
        distributed.all_reduce(reduced, op=operation, group=here.group)
        here.same(reduced, wanted.to(dtype), f"{what} with {operation}")


_IN_LISTS: dict[str, _Collective] = {
    "all_to_all": _all_to_all_lists,
    "reduce_scatter": _reduce_scatter_lists,
    "all_gather_into_tensor of a part": _all_gather_in_place,
    "all_reduce in other ways": _reduced_in_other_ways,
}


def _of_functions(here: Observer, of: str) -> None:
    """torch's functional collectives, which compilers and sharded tensors call."""
    from torch.distributed import _functional_collectives as functional

    mine = _there(here, _numbers(here, here.number, 2 * here.count, 3))
    rows = [_numbers(here, r, 2 * here.count, 3) for r in here.ranks]
    total = torch.stack(rows).sum(0)
    found: dict[str, tuple[Any, torch.Tensor]] = {
        "all_reduce": (functional.all_reduce(mine, "sum", here.group), total),
        "all_gather_tensor": (functional.all_gather_tensor(mine, 0, here.group), torch.cat(rows)),
        "all_gather_tensor of columns": (
            functional.all_gather_tensor(mine, 1, here.group), torch.cat(rows, 1),
        ),
        "reduce_scatter_tensor": (
            functional.reduce_scatter_tensor(mine, "sum", 0, here.group), total.chunk(here.count)[here.place],
        ),
    }  # fmt: skip
    if list(here.ranks) == list(range(here.count)):  # else what the root's number means is open
        found["broadcast"] = functional.broadcast(mine, here.count - 1, here.group), rows[-1]
    for name, (result, wanted) in found.items():
        here.same(functional.wait_tensor(result), wanted, f"the functional {name}{of}")
    here.same(mine, rows[here.place], f"what the functional collectives{of} read")


def _of_objects(here: Observer, of: str) -> None:
    things: list[Any] = [None] * here.count
    distributed.all_gather_object(things, ("rank", here.number), group=here.group)
    here.holds(things == [("rank", r) for r in here.ranks], f"all_gather_object{of} gives {things!r:.80}")
    sent: list[Any] = [("from", here.number)]
    distributed.broadcast_object_list(sent, here.ranks[-1], group=here.group)
    here.holds(sent == [("from", here.ranks[-1])], f"broadcast_object_list{of} gives {sent!r:.80}")


def _of_several_at_once(here: Observer, of: str) -> None:
    tensors = [_there(here, _numbers(here, here.number, n + 1)) for n in range(3)]
    distributed.all_reduce_coalesced(tensors, group=here.group)
    for n, tensor in enumerate(tensors):
        wanted = torch.stack([_numbers(here, r, n + 1) for r in here.ranks]).sum(0)
        here.same(tensor, wanted, f"tensor {n + 1} of an all_reduce_coalesced{of}")


def _of_averages(here: Observer, of: str) -> None:
    average(here, 6, torch.float32, f"all_reduce with AVG{of}")


def _of_factors(here: Observer, of: str) -> None:
    """Each rank's numbers times a factor, as NCCL and its like add them up."""
    if not here.is_of_a_vendor:
        return
    rows = torch.stack([_numbers(here, r, 6) for r in here.ranks])
    reduced = _there(here, rows[here.place].clone())
    operation: Any = distributed.distributed_c10d._make_nccl_premul_sum(0.5)  # type: ignore[attr-defined]
    distributed.all_reduce(reduced, op=operation, group=here.group)
    here.same(reduced, rows.sum(0) / 2, f"all_reduce with PREMUL_SUM{of}")


_OF_GROUPS: dict[str, Callable[[Observer, str], None]] = {
    "functional collectives": _of_functions,
    "collectives of objects": _of_objects,
    "all_reduce_coalesced": _of_several_at_once,
    "all_reduce with AVG": _of_averages,
    "all_reduce with PREMUL_SUM": _of_factors,
}


def groups_by_their_ranks(here: Observer) -> None:
    """A group in another order, ranks within a group, roots by their rank in the group, and pairs."""
    everyone = distributed.new_group(list(reversed(here.ranks)))
    place = distributed.get_group_rank(everyone, here.number)
    there = distributed.get_rank(everyone)
    here.holds(place == there, f"get_rank() of a group is {there}, get_group_rank() {place}")
    back = distributed.get_global_rank(everyone, there)
    here.holds(back == here.number, f"get_global_rank() of rank {there} is {back}, not {here.number}")
    members = sorted(distributed.get_process_group_ranks(everyone))
    here.holds(members == list(here.ranks), f"get_process_group_ranks() gives {members}")
    for root in here.ranks:
        sent = here.tensor(here.number + 4)
        distributed.broadcast(sent, group=everyone, group_src=root)
        wanted = distributed.get_global_rank(everyone, root) + 4.0
        here.same(sent, [wanted], f"broadcast from rank {root} of a group")
    gathered = [here.tensor(0) for _ in here.ranks]
    distributed.all_gather(gathered, here.tensor(here.number), group=everyone)
    order = [float(distributed.get_global_rank(everyone, r)) for r in here.ranks]
    here.same(torch.cat(gathered), order, "all_gather in a group, in the order of the group")

    def scattered() -> None:
        part = here.tensor(0)
        distributed.reduce_scatter_tensor(part, here.tensor(*map(float, here.ranks)), group=everyone)
        here.same(part, [float(here.count * there)], "reduce_scatter_tensor in a group")

    here.optional("reduce_scatter_tensor in a group", scattered)
    own, groups = distributed.new_subgroups(1)
    here.holds(distributed.get_world_size(own) == 1, "a group of new_subgroups(1) has another size")
    here.holds(len(groups) == here.count, f"new_subgroups(1) of {here.count} ranks makes {len(groups)}")
    kept = here.tensor(here.number + 6)
    distributed.all_reduce(kept, group=own)
    here.same(kept, [here.number + 6.0], "all_reduce in a group of new_subgroups(1)")


def shared_memory(here: Observer) -> None:
    """acclimate's backend for ranks of one host, and DeepSpeed's op for sums, on tensors of any strides."""
    if not is_host(here.accelerator) or not sys.platform.startswith("linux"):
        here.lacking.append("shared memory of ranks: its device is no host with Linux")
        return
    pkgutil.resolve_name("acclimate.comm.backend:register")()
    group = distributed.new_group(list(here.ranks), backend="shm")
    in_a_group(here, group, here.ranks, "over shm")
    member = here.within(group, here.ranks)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8):
        for length in _LENGTHS:
            average(member, length, dtype, f"all_reduce with AVG of {short(dtype)} over shm")
    for collective, call in {
        "all_reduce": lambda x: distributed.all_reduce(x, group=group),
        "broadcast": lambda x: distributed.broadcast(x, 0, group=group),
        "reduce": lambda x: distributed.reduce(x, 0, group=group),
    }.items():
        _with_strides(here, call, f"{collective} over shm", collective)
    distributed.destroy_process_group(group)
    builder = here.accelerator.create_op_builder("ShareMemCommBuilder")
    if builder is not None and builder.is_compatible(verbose=False):
        op: Any = builder.load()
        op.initialize(here.count, here.number)
        _with_strides(here, op.inference_all_reduce, "inference_all_reduce", "all_reduce")


def _with_strides(here: Observer, call: Callable[[torch.Tensor], Any], what: str, collective: str) -> None:
    """A collective on tensors of each kind of strides, in place, with what is beside their elements."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for name, view in STRIDES.items():
            bases = [_numbers(here, r, 6, 10, dtype=dtype) for r in here.ranks]
            mine = _there(here, bases[here.number].clone())
            wanted = bases[here.number].clone()
            reduced = torch.stack([view(base) for base in bases]).double().sum(0).to(dtype)
            if collective == "broadcast":
                view(wanted).copy_(view(bases[0]).clone())
            elif collective == "all_reduce" or here.number == 0:
                view(wanted).copy_(reduced)
            call(view(mine))
            if collective == "reduce" and here.number != 0:  # what it leaves there is undefined
                continue
            here.same(mine, wanted, f"{what} of {short(dtype)}, {name},")


STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "every second column": lambda x: x[:, ::2],
    "a column": lambda x: x[:, 3],
    "a block": lambda x: x[1:4, 2:7],
    "every second row from the second": lambda x: x[1::2],
    "permuted": lambda x: x.view(2, 3, 10).permute(2, 0, 1),
    "channels last": lambda x: x.view(1, 3, 2, 10).permute(0, 3, 1, 2),
}


def objects_of_every_kind(here: Observer) -> None:
    """Objects with tensors of the device, of lengths that differ by rank, from and to any rank."""

    def gather_to_one() -> None:
        for root in here.ranks:
            things: list[Any] | None = [None] * here.count if here.number == root else None
            distributed.gather_object({"rank": here.number, "text": "é" * here.number}, things, root)
            wanted = [{"rank": r, "text": "é" * r} for r in here.ranks]
            here.holds(
                things is None or things == wanted, f"gather_object to rank {root} gives {things!r:.80}"
            )

    def scatter() -> None:
        for root in here.ranks:
            received: list[Any] = [None]
            given = [("for", r, "x" * 40 * r) for r in here.ranks] if here.number == root else None
            distributed.scatter_object_list(received, given, root)
            wanted = ("for", here.number, "x" * 40 * here.number)
            here.holds(
                received[0] == wanted, f"scatter_object_list from rank {root} gives {received[0]!r:.80}"
            )

    def tensors() -> None:
        things: list[Any] = [None] * here.count
        distributed.all_gather_object(things, {"numbers": torch.arange(here.number + 2.0)})
        for r in here.ranks:
            here.same(things[r]["numbers"], torch.arange(r + 2.0), "a tensor in an all_gather_object")

    def messages() -> None:
        """From rank 0 to rank 1 and back, to and from ranks that are named in each way."""
        for sender, receiver in ((0, 1), (1, 0)):
            sent = [{"of": sender, "text": "é" * 90}, sender, None]
            if here.number == sender:
                distributed.send_object_list(sent, receiver)
                distributed.send_object_list(sent[:1], group_dst=receiver)
            elif here.number == receiver:
                received: list[Any] = [None] * 3
                told = distributed.recv_object_list(received, sender)
                here.holds(told == sender, f"recv_object_list says that rank {told} sent, not {sender}")
                here.holds(received == sent, f"recv_object_list gives {received!r:.80}")
                first: list[Any] = [None]
                distributed.recv_object_list(first, group_src=sender)
                here.holds(first == sent[:1], f"recv_object_list by group_src gives {first!r:.80}")

    here.optional("gather_object", gather_to_one)
    if here.count > 1:
        here.optional("send_object_list", messages)
    here.optional("scatter_object_list", scatter)
    here.optional("all_gather_object of tensors", tensors)


def models_are_trained_together(here: Observer) -> None:
    """DistributedDataParallel averages gradients, sends buffers of rank 0, and obeys no_sync."""
    device = here.accelerator.current_device_name()
    # torch counts which parameters were used in pinned memory, or fails.
    finds_unused = is_host(here.accelerator) or here.accelerator.pin_empty(1, dtype=torch.float32).is_pinned()
    if not finds_unused:
        here.lacking.append("unused parameters in DistributedDataParallel: it does not pin memory")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(7, 5)
            self.unused = torch.nn.Linear(3, 3) if finds_unused else None
            self.outer = torch.nn.Linear(5, 3, bias=False)
            self.seen: torch.Tensor
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.outer(self.inner(x).relu()) + self.seen
            return found

    def made(seed: int) -> Model:
        torch.manual_seed(seed)
        model = Model()
        model.seen.fill_(float(seed))
        return model.to(device)

    def inputs(rank: int) -> torch.Tensor:
        return _there(here, _numbers(here, rank, 4, 7) / 8)

    for as_views in (False, True):
        model = made(here.number + 5)  # other weights on each rank: those of rank 0 count
        together = torch.nn.parallel.DistributedDataParallel(
            model, find_unused_parameters=finds_unused, bucket_cap_mb=1, gradient_as_bucket_view=as_views
        )
        _train_together(here, model, together, made(5), inputs, " with gradient_as_bucket_view" * as_views)

    def by_index() -> None:
        """The inputs are on the host: with device_ids the model takes them to its device."""
        model = made(here.number + 5)
        together = torch.nn.parallel.DistributedDataParallel(
            model, device_ids=[here.accelerator.current_device()], find_unused_parameters=finds_unused
        )
        _train_together(
            here, model, together, made(5), lambda rank: inputs(rank).cpu(), " with device_ids",
            inputs,
        )  # fmt: skip

    if not is_host(here.accelerator):
        here.optional("DistributedDataParallel with device_ids", by_index)


def _train_together(
    here: Observer, model: torch.nn.Module, together: Any, reference: torch.nn.Module,
    inputs: Callable[[int], torch.Tensor], how: str, there: Callable[[int], torch.Tensor] | None = None,
) -> None:  # fmt: skip
    for name, found in model.state_dict().items():
        here.same(found, reference.state_dict()[name], f"{name} of rank 0 in DistributedDataParallel{how}")
    for turn in range(2):
        together.zero_grad()
        with together.no_sync():
            together(inputs(here.number)).square().mean().backward()
        together(inputs(here.number + 1)).square().mean().backward()
        reference.zero_grad()
        for rank in here.ranks:
            for given in (rank, rank + 1):
                (reference((there or inputs)(given)).square().mean() / here.count).backward()
        for (name, parameter), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
            if wanted.grad is None or parameter.grad is None:
                here.holds(wanted.grad is None, f"DistributedDataParallel{how} leaves no gradient of {name}")
                continue
            apart = float((parameter.grad - wanted.grad).abs().max().cpu())
            largest = float(wanted.grad.abs().max().cpu())
            here.holds(
                apart <= 1e-3 * max(largest, 1e-3),
                f"the gradient of {name} in DistributedDataParallel{how} is off by {apart:.1e} in turn "
                f"{turn + 1}",
            )
        with torch.no_grad():
            for parameter in (*model.parameters(), *reference.parameters()):
                parameter.mul_(0.75)


def meshes_and_sharded_tensors(here: Observer) -> None:
    """A mesh of all ranks, and tensors sharded over it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def run() -> None:
        try:
            mesh = init_device_mesh(here.accelerator.device_type, (here.count,))
        except AttributeError as error:  # it asks torch's module for the device for what not all have
            raise NotImplementedError(describe(error)) from error
        whole = _there(here, _numbers(here, 0, 2 * here.count + 1, 5))
        for dimension in (0, 1):
            sharded: Any = distribute_tensor(whole, mesh, [Shard(dimension)])
            again = sharded.redistribute(mesh, [Replicate()]).to_local()
            here.same(again, whole.cpu(), f"a tensor sharded over dimension {dimension} and put together")
            there = sharded.redistribute(mesh, [Shard(1 - dimension)]).full_tensor()
            here.same(there, whole.cpu(), f"a tensor sharded over dimension {dimension}, then the other")
            product = (sharded @ sharded.t()).full_tensor()
            here.same(product, whole.cpu() @ whole.cpu().t(), "a product of sharded matrices")

    here.optional("DeviceMesh", run)


def ranks_that_end(here: Observer) -> None:
    """The last rank ends in the middle of a collective: the others are told, and go on."""
    if here.is_of_a_vendor or here.count < 2:
        here.lacking.append("errors after another rank's end: it ends the process")
        return
    distributed.barrier()
    group = distributed.new_group(list(here.ranks), timeout=timedelta(seconds=_GROUP_TIMEOUT_S))
    distributed.barrier()
    if here.number == here.count - 1:
        here.last_act = lambda: distributed.all_reduce(here.full(_LONG, 1), group=group, async_op=True)
        return
    # Twice, as the rank that ended may have taken part in the first.
    raised, waited = _reduces(here, [here.full(_LONG, 1) for _ in range(2)], group)
    here.holds(raised, "all_reduce returns although a rank has ended before it")
    here.holds(
        waited < _LATEST_S,
        f"all_reduce raises {waited:.0f} s after another rank has ended, not within the group's time-out of "
        f"{_GROUP_TIMEOUT_S:.0f} s",
    )
    reduced = here.tensor(3) * 2
    here.same(reduced, [6.0], "a product after a collective that another rank's end has broken")


def _reduces(here: Observer, tensors: list[torch.Tensor], group: Any) -> tuple[bool, float]:
    """Whether all_reduce of the tensors in their order raises, and after how many seconds it is over."""
    start = time.monotonic()
    try:
        for tensor in tensors:
            distributed.all_reduce(tensor, group=group)
            here.accelerator.synchronize()
    except RuntimeError:
        return True, time.monotonic() - start
    return False, time.monotonic() - start


def time_limits_of_groups(here: Observer) -> None:
    """A collective that another rank does not join raises after the time-out of its group."""
    if here.is_of_a_vendor or here.count < 2:
        here.lacking.append("errors after a time-out: it ends the process")
        return
    distributed.barrier()  # the time-out also applies to making the group, to which a rank may come late
    group = distributed.new_group(list(here.ranks), timeout=timedelta(seconds=_SHORT_TIMEOUT_S))
    distributed.barrier()
    if here.number == 0:
        raised, waited = _reduces(here, [here.tensor(1)], group)
        here.holds(raised, "all_reduce that no other rank joins returns")
        here.holds(
            waited < _LATEST_S,
            f"all_reduce that no other rank joins raises after {waited:.0f} s, not after the group's "
            f"time-out of {_SHORT_TIMEOUT_S:.0f} s",
        )
    distributed.barrier()
