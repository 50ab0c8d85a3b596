"""Topics of ranks: collectives with their options, groups by their own ranks, and time-outs."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from acclimate.imports import describe
from acclimate_conformance.checks.assertions import is_host, short
from acclimate_conformance.checks.communication.observer import Observer

_LENGTHS = (1, 5, 34)
_MANY = 60
_GROUP_TIMEOUT_S, _LATEST_S = 5.0, 30.0


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
        for name, collective in _COLLECTIVES.items():

            def run(name: str = name, call: _Collective = collective, dtype: torch.dtype = dtype) -> None:
                for length in _LENGTHS:
                    call(here, length, dtype, f"{name} of {length} elements of {short(dtype)}")

            here.optional(f"{name} of {short(dtype)}", run)


def _reduce(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    for root in here.ranks:
        for operation, name in ((distributed.ReduceOp.SUM, "sum"), (distributed.ReduceOp.MAX, "amax")):
            reduced = _there(here, _numbers(here, here.number, length, dtype=dtype))
            distributed.reduce(reduced, root, op=operation)
            if here.number == root:
                all_ranks = torch.stack([_numbers(here, r, length, dtype=dtype) for r in here.ranks])
                wanted = getattr(all_ranks.double(), name)(0)
                here.same(reduced, wanted.to(dtype), f"{what} with {name} to rank {root}")


def _gather(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    for root in here.ranks:
        mine = _there(here, _numbers(here, here.number, 2, length, dtype=dtype))
        parts = [torch.zeros_like(mine) for _ in here.ranks] if here.number == root else None
        distributed.gather(mine, parts, root)
        for r, part in enumerate(parts or ()):
            here.same(part, _numbers(here, r, 2, length, dtype=dtype), f"part {r} of a {what} to rank {root}")


def _scatter(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    for root in here.ranks:
        received = _there(here, torch.zeros(2, length, dtype=dtype))
        whole = [_there(here, _numbers(here, r + root, 2, length, dtype=dtype)) for r in here.ranks]
        distributed.scatter(received, whole if here.number == root else None, root)
        here.same(
            received, _numbers(here, here.number + root, 2, length, dtype=dtype), f"{what} from rank {root}"
        )


def _reduce_scatter(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    for operation, name in ((distributed.ReduceOp.SUM, "sum"), (distributed.ReduceOp.MAX, "amax")):
        given = _there(here, _numbers(here, here.number, here.count * length, dtype=dtype))
        part = torch.zeros(length, dtype=dtype, device=given.device)
        distributed.reduce_scatter_tensor(part, given, op=operation)
        every = torch.stack([_numbers(here, r, here.count * length, dtype=dtype) for r in here.ranks])
        wanted = getattr(every.double(), name)(0).to(dtype)[here.number * length :][:length]
        here.same(part, wanted, f"{what} with {name}")


def _all_gather_matrices(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    mine = _there(here, _numbers(here, here.number, 2, length, dtype=dtype))
    whole = torch.zeros(2 * here.count, length, dtype=dtype, device=mine.device)
    distributed.all_gather_into_tensor(whole, mine)
    wanted = torch.cat([_numbers(here, r, 2, length, dtype=dtype) for r in here.ranks])
    here.same(whole, wanted, f"{what}, of matrices")


def _all_to_all(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    for first, second in ((1, 0), (0, 2), (2, 3), (3, 1)):
        # From rank s to rank r: equal and unequal parts, also of no rows, both sent and received.
        sizes = [[(length + first * r + second * s) % 5 for r in here.ranks] for s in here.ranks]
        given = _there(here, _numbers(here, here.number, sum(sizes[here.number]), 2, dtype=dtype))
        takes = [sizes[s][here.number] for s in here.ranks]
        received = torch.zeros(sum(takes), 2, dtype=dtype, device=given.device)
        distributed.all_to_all_single(received, given, takes, sizes[here.number])
        parts = []
        for s in here.ranks:
            start = sum(sizes[s][: here.number])
            parts.append(_numbers(here, s, sum(sizes[s]), 2, dtype=dtype)[start : start + takes[s]])
        here.same(received, torch.cat(parts), f"{what} with parts of {takes} rows")


def _send(here: Observer, length: int, dtype: torch.dtype, what: str) -> None:
    """Each rank sends to the next, the first rank first."""
    if here.count < 2:
        return
    after, before = (here.number + 1) % here.count, (here.number - 1) % here.count
    mine = _there(here, _numbers(here, here.number, length, 2, dtype=dtype))
    received = torch.zeros_like(mine)
    operations = [
        distributed.P2POp(distributed.isend, mine, after),
        distributed.P2POp(distributed.irecv, received, before),
    ]
    for work in distributed.batch_isend_irecv(operations):
        work.wait()
    here.accelerator.synchronize()
    here.same(received, _numbers(here, before, length, 2, dtype=dtype), f"{what} from rank {before}")


_Collective = Callable[[Observer, int, torch.dtype, str], None]
_COLLECTIVES: dict[str, _Collective] = {
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_gather_into_tensor": _all_gather_matrices,
    "all_to_all_single": _all_to_all,
    "batch_isend_irecv": _send,
}


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
    for name, collective in _COLLECTIVES.items():

        def run(name: str = name, call: _Collective = collective) -> None:
            for turn in range(1, _MANY // 3 + 1):
                call(here, 3 + turn % 2, torch.float32, f"call {turn} of {name}")

        here.optional(name, run)


def collectives_that_wait_later(here: Observer) -> None:
    """Each collective with ``async_op`` returns work, and its result is complete after ``wait()``."""
    device = here.accelerator.current_device_name()
    total = sum(r + 1 for r in here.ranks)

    def mine(length: int = 3) -> torch.Tensor:
        return torch.full((length,), here.number + 1.0, device=device)

    def zeros(length: int = 3) -> torch.Tensor:
        return torch.zeros(length, device=device)

    root = here.count - 1
    reduced, gathered, whole, part = mine(), [zeros() for _ in here.ranks], zeros(3 * here.count), zeros()
    scattered, exchanged, sent = zeros(), zeros(here.count), mine()
    at_root = [zeros() for _ in here.ranks] if here.number == root else None
    given = [mine() * (r + 1) for r in here.ranks] if here.number == root else None
    calls: dict[str, Callable[[], Any]] = {
        "reduce": lambda: distributed.reduce(reduced, root, async_op=True),
        "all_gather": lambda: distributed.all_gather(gathered, mine(), async_op=True),
        "all_gather_into_tensor": lambda: distributed.all_gather_into_tensor(whole, mine(), async_op=True),
        "reduce_scatter_tensor": lambda: distributed.reduce_scatter_tensor(
            part, mine(3 * here.count), async_op=True
        ),
        "gather": lambda: distributed.gather(mine(), at_root, root, async_op=True),
        "scatter": lambda: distributed.scatter(scattered, given, root, async_op=True),
        "all_to_all_single": lambda: distributed.all_to_all_single(
            exchanged, mine(here.count), async_op=True
        ),
        "broadcast": lambda: distributed.broadcast(sent, root, async_op=True),
        "barrier": lambda: distributed.barrier(async_op=True),
    }
    lacks = set()
    for name, call in calls.items():

        def run(name: str = name, call: Callable[[], Any] = call) -> None:
            work = call()
            here.holds(work is not None, f"{name} with async_op=True returns nothing to wait for")
            if work is not None:
                work.wait()
                here.accelerator.synchronize()

        before = len(here.lacking)
        here.optional(f"{name} with async_op", run)
        if len(here.lacking) > before:
            lacks.add(name)
    ones = torch.ones(3)
    every = torch.cat([ones * (r + 1) for r in here.ranks])
    results: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        "all_gather": (torch.cat(gathered), every),
        "all_gather_into_tensor": (whole, every),
        "reduce_scatter_tensor": (part, ones * total),
        "broadcast": (sent, ones * (root + 1)),
        "scatter": (scattered, ones * (root + 1) * (here.number + 1)),
        "all_to_all_single": (exchanged, torch.tensor([r + 1.0 for r in here.ranks])),
    }
    if here.number == root and at_root is not None:
        results |= {"reduce": (reduced, ones * total), "gather": (torch.cat(at_root), every)}
    for name, (found, wanted) in results.items():
        if name not in lacks:
            here.same(found, wanted, f"{name} with async_op")


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

    here.optional("gather_object", gather_to_one)
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

    model = made(here.number + 5)  # other weights on each rank: those of rank 0 count
    together = torch.nn.parallel.DistributedDataParallel(
        model, find_unused_parameters=finds_unused, bucket_cap_mb=1
    )
    reference = made(5)
    for name, found in model.state_dict().items():
        here.same(found, reference.state_dict()[name], f"{name} of rank 0 in DistributedDataParallel")
    for turn in range(2):
        together.zero_grad()
        with together.no_sync():
            together(inputs(here.number)).square().mean().backward()
        together(inputs(here.number + 1)).square().mean().backward()
        reference.zero_grad()
        for rank in here.ranks:
            for given in (rank, rank + 1):
                (reference(inputs(given)).square().mean() / here.count).backward()
        for (name, parameter), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
            if wanted.grad is None or parameter.grad is None:
                here.holds(wanted.grad is None, f"DistributedDataParallel leaves no gradient of {name}")
                continue
            apart = float((parameter.grad - wanted.grad).abs().max().cpu())
            largest = float(wanted.grad.abs().max().cpu())
            here.holds(
                apart <= 1e-3 * max(largest, 1e-3),
                f"the gradient of {name} in DistributedDataParallel is off by {apart:.1e} in turn {turn + 1}",
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


def time_limits_of_groups(here: Observer) -> None:
    """A collective that another rank does not join raises after the time-out of its group."""
    if here.is_of_a_vendor or here.count < 2:
        here.lacking.append("errors after a time-out: it ends the process")
        return
    distributed.barrier()  # the time-out also applies to making the group, to which a rank may come late
    group = distributed.new_group(list(here.ranks), timeout=timedelta(seconds=_GROUP_TIMEOUT_S))
    distributed.barrier()
    if here.number == 0:
        start = time.monotonic()
        raised = False
        try:
            distributed.all_reduce(here.tensor(1), group=group)
            here.accelerator.synchronize()
        except RuntimeError:
            raised = True
        waited = time.monotonic() - start
        here.holds(raised, "all_reduce that no other rank joins returns")
        here.holds(
            waited < _LATEST_S,
            f"all_reduce that no other rank joins raises after {waited:.0f} s, not after the group's "
            f"time-out of {_GROUP_TIMEOUT_S:.0f} s",
        )
    distributed.barrier()
