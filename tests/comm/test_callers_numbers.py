"""Numbers from callers that no tensor, group or clock can hold are errors, and leave the group usable."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rank_processes import RankProcesses

_GIANT = 1 << 62


def add(rank: int) -> float:
    tensor = torch.full((10,), float(rank + 1))
    dist.all_reduce(tensor)
    return float(tensor[-1])


def cpu_backend() -> Any:
    group: Any = dist.group.WORLD
    return group._get_backend(torch.device("cpu"))


@pytest.fixture(scope="module")
def four() -> Iterator[RankProcesses]:
    with RankProcesses(4) as processes:
        yield processes


def is_usable(group: RankProcesses) -> bool:
    return group.values(add) == [10.0] * 4


# -- sizes -------------------------------------------------------------------------------------------


def exchange(rank: int, split: list[int], wrong_ranks: list[int]) -> None:
    fair = [2, 2, 2, 2]
    output, data = torch.empty(8), torch.ones(8)
    inputs = outputs = split if rank in wrong_ranks else fair
    work = cpu_backend().alltoall_base(output, data, outputs, inputs, dist.AllToAllOptions())
    work.wait()


WRAPPED = [
    [_GIANT + 2] * 4,
    [(1 << 63) - 1, (1 << 63) - 1, 10, 0],
    [-1, 9, 0, 0],
    [9, 0, 0, 0],
]


@pytest.mark.parametrize("split", WRAPPED, ids=["sum wraps", "twice the largest", "negative", "one too many"])
def test_split_sizes_beyond_the_tensor_are_an_error_on_every_rank(
    four: RankProcesses, split: list[int]
) -> None:
    for told in four.run(exchange, split, [0, 1, 2, 3]):
        assert "split sizes must" in told.error, told
    told = four.run(exchange, split, [2])
    assert "split sizes must" in told[2].error
    assert all("Rank 2 got wrong arguments for all_to_all" in told[rank].error for rank in (0, 1, 3))
    assert is_usable(four)


def gather_a_giant(rank: int, elements: int) -> None:
    dist.all_gather_into_tensor(torch.empty(0), torch.empty(1).expand(elements))


def scatter_a_giant(rank: int, elements: int) -> None:
    dist.reduce_scatter_tensor(torch.empty(1).expand(elements), torch.empty(0))


@pytest.mark.parametrize("call", [gather_a_giant, scatter_a_giant])
@pytest.mark.parametrize("elements", [_GIANT, _GIANT - 1])
def test_a_count_whose_product_with_the_ranks_wraps_is_an_error(
    four: RankProcesses, call: Any, elements: int
) -> None:
    for told in four.run(call, elements):
        assert "4 times the" in told.error, told
    assert is_usable(four)


# -- ranks and tags ----------------------------------------------------------------------------------

ROOTS = [4, -1, 1 << 32, (1 << 32) + 1, -(1 << 31)]


def call_with_root(rank: int, kind: str, root: int) -> None:
    options: Any = getattr(dist, f"{kind.capitalize()}Options")()
    options.rootRank = root
    x = torch.ones(8)
    if kind in ("gather", "scatter"):
        many = [[torch.ones(8) for _ in range(4)]]
        first, second = (many, [x]) if kind == "gather" else ([x], many)
        getattr(cpu_backend(), kind)(first, second, options).wait()
    else:
        getattr(cpu_backend(), kind)([x], options).wait()


@pytest.mark.parametrize("kind", ["broadcast", "reduce", "gather", "scatter"])
@pytest.mark.parametrize("root", ROOTS)
def test_a_root_outside_the_group_is_an_error_on_every_rank(
    four: RankProcesses, kind: str, root: int
) -> None:
    for told in four.run(call_with_root, kind, root):
        assert f"the root must be a rank from 0 to 3, but is {root}" in told.error, told
    assert is_usable(four)


def send_to(rank: int, peer: int) -> None:
    cpu_backend().send([torch.ones(2)], peer, 0)


def receive_from(rank: int, peer: int) -> None:
    cpu_backend().recv([torch.ones(2)], peer, 0)


@pytest.mark.parametrize("call", [send_to, receive_from])
@pytest.mark.parametrize("peer", [4, -1, -2, 1 << 30])
def test_a_peer_outside_the_group_is_an_error(four: RankProcesses, call: Any, peer: int) -> None:
    for told in four.run(call, peer):
        assert f"must be a rank from 0 to 3, but is {peer}" in told.error, told
    assert is_usable(four)


# -- lists -------------------------------------------------------------------------------------------


def call_with_lists(rank: int, kind: str, count: int) -> None:
    x = [torch.ones(8)]
    many = [torch.ones(8) for _ in range(count)]
    backend = cpu_backend()
    if kind == "allgather":
        backend.allgather([many], x).wait()
    elif kind == "gather":
        backend.gather([many] if rank == 0 else [], x, dist.GatherOptions()).wait()
    elif kind == "scatter":
        backend.scatter(x, [many] if rank == 0 else [], dist.ScatterOptions()).wait()
    elif kind == "reduce_scatter":
        backend.reduce_scatter(x, [many], dist.ReduceScatterOptions()).wait()
    else:
        backend.alltoall(many, many, dist.AllToAllOptions()).wait()


@pytest.mark.parametrize("kind", ["allgather", "gather", "scatter", "reduce_scatter", "alltoall"])
@pytest.mark.parametrize("count", [0, 3, 5])
def test_a_list_of_another_length_is_an_error_on_every_rank(
    four: RankProcesses, kind: str, count: int
) -> None:
    told = four.run(call_with_lists, kind, count)
    assert f"but got {count}" in told[0].error, told
    assert all("expected 4" in answer.error or "wrong arguments" in answer.error for answer in told), told
    assert is_usable(four)


# -- memory ------------------------------------------------------------------------------------------

_LARGE = 64 << 20


def send_large_then_small(rank: int, allowed: int) -> str:
    """Rank 1 has room for the small message only, and must keep the large one until its recv."""
    if rank == 0:
        large, small = torch.ones(_LARGE, dtype=torch.uint8), torch.ones(1)
        dist.barrier()
        dist.send(large, 1, tag=1)
        dist.send(small, 1, tag=2)
        return "sent"
    small = torch.empty(1)
    dist.barrier()
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + allowed, resource.RLIM_INFINITY))
    try:
        dist.recv(small, 0, tag=2)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "received"


def join(rank: int) -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return float(tensor)


def test_a_message_that_does_not_fit_into_memory_is_an_error_on_both_ranks() -> None:
    with RankProcesses(2, timeout_s=30) as two:
        told = two.run(send_large_then_small, _LARGE // 2)
        assert all(process.is_running() for process in two.processes)
        for answer in told:
            assert answer.error.startswith("DistBackendError"), answer
            assert "Rank 1 has too little memory" in answer.error
            assert "send of 67108864 uint8 with tag 1" in answer.error
            assert "cannot be used any more" in answer.error
        assert all("cannot be used any more" in answer.error for answer in two.run(join))


# -- times -------------------------------------------------------------------------------------------

CENTURIES = timedelta(days=365 * 300)


def wait_long(rank: int, how: str, timeout: timedelta) -> float:
    tensor = torch.full((2,), float(rank + 1))
    if rank == 1:
        time.sleep(0.3)  # so that the other rank waits long enough to look at its time-out
    if how == "all_reduce":
        options = dist.AllreduceOptions()
        options.timeout = timeout
        cpu_backend().allreduce([tensor], options).wait()
    elif how == "async":
        dist.all_reduce(tensor, async_op=True).wait(timeout)
    elif how == "barrier":
        dist.barrier()
    else:
        work: Any = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
        work.wait(timeout)
    return float(tensor[0])


@pytest.mark.parametrize(
    "timeout",
    [
        CENTURIES,
        *(pytest.param(timedelta(days=days), marks=pytest.mark.slow) for days in (106_751, 10**6)),
    ],
)
def test_a_group_waits_with_a_timeout_of_centuries(timeout: timedelta) -> None:
    with RankProcesses(2, timeout_s=timeout.total_seconds()) as two:
        assert two.values(wait_long, "all_reduce", timeout) == [3.0, 3.0]
        assert two.values(wait_long, "async", timeout) == [3.0, 3.0]
        assert two.values(wait_long, "barrier", timeout) == [1.0, 2.0]
        assert two.values(wait_long, "message", timeout) == [1.0, 1.0]


# -- lists of tensors in one call ---------------------------------------------------------------------


def call_with_many(rank: int, kind: str, counts: list[int]) -> int:
    count = counts[rank]
    small, large = [torch.ones(2) for _ in range(count)], [torch.ones(8) for _ in range(count)]
    group: Any = dist.group.WORLD
    if kind == "all_reduce":
        group.allreduce_coalesced(small, dist.AllreduceCoalescedOptions()).wait()
    elif kind == "all_gather":
        lists = [[torch.ones(2) for _ in range(count)] for _ in range(4)]
        group.allgather_coalesced(lists, small).wait()
    elif kind == "all_gather_into_tensor":
        group.allgather_into_tensor_coalesced(large, small).wait()
    else:
        group.reduce_scatter_tensor_coalesced(small, large).wait()
    return count


@pytest.mark.parametrize(
    "kind", ["all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"]
)
@pytest.mark.parametrize("counts", [[3, 2, 3, 3], [2, 2, 2, 1], [1, 4, 4, 4]])
def test_lists_of_different_lengths_are_an_error_on_every_rank(
    four: RankProcesses, kind: str, counts: list[int]
) -> None:
    for told in four.run(call_with_many, kind, counts):
        assert "All ranks of a group have to call the same collectives" in told.error, told
    assert is_usable(four)
    assert four.values(call_with_many, kind, [3] * 4) == [3] * 4


# -- memory that is not a tensor's own ----------------------------------------------------------------


def call_on_freed(rank: int, kind: str, wrong_ranks: list[int]) -> None:
    x = torch.ones(8)
    if rank in wrong_ranks:
        x.untyped_storage().resize_(0)
    if kind == "all_reduce":
        dist.all_reduce(x)
    elif kind == "all_gather_into_tensor":
        dist.all_gather_into_tensor(torch.empty(32), x)
    else:
        dist.all_to_all([torch.ones(8) for _ in range(4)], [x] * 4)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather_into_tensor", "all_to_all"])
def test_a_tensor_whose_memory_was_freed_is_an_error_on_every_rank(four: RankProcesses, kind: str) -> None:
    told = four.run(call_on_freed, kind, [2])
    assert "needs 32 bytes of memory, but its storage has 0" in told[2].error, told
    assert all("Rank 2 got wrong arguments" in told[rank].error for rank in (0, 1, 3)), told
    assert is_usable(four)


def reduce_expanded(rank: int, wrong_ranks: list[int]) -> None:
    dist.all_reduce(torch.ones(1).expand(8) if rank in wrong_ranks else torch.ones(8))


def test_an_expanded_result_is_an_error_on_every_rank(four: RankProcesses) -> None:
    told = four.run(reduce_expanded, [1])
    assert "expanded tensor" in told[1].error, told
    assert all("Rank 1 got wrong arguments" in told[rank].error for rank in (0, 2, 3)), told
    assert is_usable(four)
