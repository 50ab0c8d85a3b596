"""Ranks on two hosts share memory on each, and gloo links the hosts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import network_hosts
import pytest
import torch
import torch.distributed as dist
from collective_cases import COMPLEX, FLOAT8, FLOATS, Case, cases, expected, run
from hypothesis import HealthCheck, given, settings

import acclimate
from ports import free_port
from rank_processes import RankProcesses, Told, wait_no_longer_than

RANKS = 4
UNEVEN = [0, 1, 3]
"""Of these, rank 0 is alone on its host."""
TOLERANCE = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 1e-5, torch.complex64: 1e-5}
pytestmark = pytest.mark.skipif(network_hosts.why_not() is not None, reason=f"{network_hosts.why_not()}")
_groups: dict[int, Any] = {}


def place_of(rank: int) -> int:
    return rank % 2


def move(rank: int) -> None:
    network_hosts.enter(os.environ["PLACES"].split(",")[place_of(rank)])


def join(rank: int, port: int) -> None:
    acclimate.init_distributed(
        init_method=f"tcp://{network_hosts.ADDRESSES[0]}:{port}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )


class Ranks(RankProcesses):
    """Ranks 0 and 2 on one host, 1 and 3 on the other."""

    def __init__(self, hosts: network_hosts.NetworkHosts) -> None:
        super().__init__(RANKS, backend=None, environment={"PLACES": ",".join(hosts.places)}, before=move)
        for told in self.joined():
            assert not told.error, told
        self.values(join, free_port())


@pytest.fixture(scope="module")
def hosts() -> Iterator[network_hosts.NetworkHosts]:
    made = network_hosts.NetworkHosts()
    yield made
    made.close()


@pytest.fixture(scope="module")
def ranks(hosts: network_hosts.NetworkHosts) -> Iterator[RankProcesses]:
    processes = Ranks(hosts)
    processes.values(make_groups)
    yield processes
    processes.stop()


def make_groups(_: int) -> None:
    _groups[4] = dist.group.WORLD
    _groups[3] = dist.new_group(UNEVEN)
    _groups[2] = dist.new_group([1, 3])


def members(count: int) -> list[int]:
    return {4: [0, 1, 2, 3], 3: UNEVEN, 2: [1, 3]}[count]


def run_case(rank: int, case: Case) -> str:
    if rank not in members(case.ranks):
        return ""
    number = members(case.ranks).index(rank)
    wanted = expected(case, number)
    for result, right in zip(run(case, number, _groups[case.ranks]), wanted or (), strict=False):
        if case.dtype in (*FLOATS, *FLOAT8, *COMPLEX):
            # Added in the order of the hosts.
            near = TOLERANCE.get(case.dtype, 0.3 if case.dtype in FLOAT8 else 2e-2)
            wide = torch.complex128 if case.dtype in COMPLEX else torch.float64
            torch.testing.assert_close(result.to(wide), right.to(wide), rtol=near, atol=near, equal_nan=True)
        elif not torch.equal(result, right):
            return f"rank {rank}: {result.flatten()[:6]} where {right.flatten()[:6]} is right"
    return ""


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases(RANKS))
def test_every_collective_of_every_dtype_and_layout_gives_what_plain_torch_gives_across_hosts(
    ranks: RankProcesses, case: Case
) -> None:
    assert ranks.values(run_case, case) == [""] * RANKS


@pytest.mark.slow
@settings(max_examples=800, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases(RANKS))
def test_many_collectives_give_what_plain_torch_gives_across_hosts(ranks: RankProcesses, case: Case) -> None:
    assert ranks.values(run_case, case) == [""] * RANKS


def same_bits(rank: int) -> list[bytes]:
    generator = torch.Generator().manual_seed(rank)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        tensor = torch.randn(70_000, generator=generator).to(dtype)
        dist.all_reduce(tensor)
        results.append(tensor.view(torch.uint8).numpy().tobytes())
    return results


def test_all_ranks_of_all_hosts_get_the_same_bits(ranks: RankProcesses) -> None:
    told = ranks.values(same_bits)
    assert all(bits == told[0] for bits in told)


def find_backend(rank: int) -> list[tuple[str, str]]:
    found = []
    for group in (_groups[4], _groups[2]):
        if rank in dist.get_process_group_ranks(group):
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            backend = group._get_backend(torch.device("cpu"))
            found.append((backend.name(), f"{tensor.item():g}"))
    return found


def test_groups_across_hosts_and_on_one_are_of_the_same_backend(ranks: RankProcesses) -> None:
    assert ranks.values(find_backend) == [[("shm", "4")], [("shm", "4"), ("shm", "2")]] * 2


# -- different calls ---------------------------------------------------------------------------------


def differ(rank: int, how: str) -> None:
    if how == "size on the other host":
        dist.all_reduce(torch.ones(8 + place_of(rank)))
    elif how == "size on one host":
        dist.all_reduce(torch.ones(9 if rank == 3 else 8))
    elif how == "collective":
        dist.broadcast(torch.ones(8), 0) if place_of(rank) else dist.all_reduce(torch.ones(8))
    elif how == "refused":
        output = torch.empty(7 if rank == 1 else 4 * 8)
        dist.all_gather_into_tensor(output, torch.ones(8))
    elif how == "split":
        splits = [4, 2, 1, 1] if rank == 1 else [2] * 4
        dist.all_to_all_single(torch.empty(8), torch.ones(8), splits, splits)


SAID = {
    "size on the other host": (
        "Rank 0 called all_reduce(SUM) of 8 float32, but rank 1 called all_reduce(SUM) of 9 float32."
    ),
    "size on one host": (
        "Rank 1 called all_reduce(SUM) of 8 float32, but rank 3 called all_reduce(SUM) of 9 float32."
    ),
    "collective": (
        "Rank 0 called all_reduce(SUM) of 8 float32, but rank 1 called broadcast of 8 float32 from rank 0."
    ),
    "refused": "Rank 1 got wrong arguments for all_gather of 8 float32",
    "split": (
        "Rank 0 called all_to_all with 2 elements for rank 1, but rank 1 expects 4 elements from rank 0."
    ),
}


@pytest.mark.parametrize("how", SAID)
def test_different_calls_across_hosts_are_an_error_on_every_rank_that_names_both_sides(
    ranks: RankProcesses, how: str
) -> None:
    for rank, told in enumerate(ranks.run(differ, how)):
        if how == "refused" and rank == 1:
            assert "the output must have 4 times the input's 8 elements" in told.error
        else:
            assert SAID[how] in told.error, told
            assert told.error.startswith("DistBackendError")
    assert ranks.values(find_backend)[0] == [("shm", "4")]  # the group goes on


# -- messages ----------------------------------------------------------------------------------------


def pass_messages(rank: int) -> list[float]:
    after, before = (rank + 1) % RANKS, (rank - 1) % RANKS
    big = [torch.full((30_000,), float(10 * rank + number)) for number in range(3)]
    works = [dist.isend(tensor, after, tag=number) for number, tensor in enumerate(big)]
    got = [torch.zeros(30_000) for _ in range(3)]
    for number in (2, 0, 1):
        dist.recv(got[number], before, tag=number)
    for work in works:
        work.wait()
    return [float(tensor[-1]) for tensor in got]


def test_messages_between_hosts_arrive_whole_by_their_tags(ranks: RankProcesses) -> None:
    told = ranks.values(pass_messages)
    assert told == [[10.0 * ((rank - 1) % RANKS) + number for number in range(3)] for rank in range(RANKS)]


def receive_from_anyone(rank: int) -> list[int]:
    if rank == 0:
        senders = []
        for _ in range(RANKS - 1):
            tensor = torch.zeros(2, 2, dtype=torch.bfloat16).t()
            senders.append(dist.recv(tensor))
            assert tensor.tolist() == [[senders[-1], 1.0], [0.0, 2.0]]
        return sorted(senders)
    dist.send(torch.tensor([[rank, 1.0], [0.0, 2.0]], dtype=torch.bfloat16), 0)
    return []


def test_a_message_between_hosts_can_come_from_any_rank(ranks: RankProcesses) -> None:
    assert ranks.values(receive_from_anyone)[0] == [1, 2, 3]


def use_a_large_tag(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(1), 2, tag=1 << 30)
    elif rank == 2:
        dist.recv(torch.ones(1), 0, tag=1 << 30)


def test_a_tag_that_messages_between_hosts_cannot_have_is_an_error_on_both_sides(
    ranks: RankProcesses,
) -> None:
    told = ranks.run(use_a_large_tag)
    assert all("a tag must be from 0 to 715827881, but is 1073741824" in told[rank].error for rank in (0, 2))
    assert all(len(arrived) for arrived in ranks.values(pass_messages))


def send_another_size(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(8), 1, tag=3)
    elif rank == 1:
        dist.recv(torch.ones(4), 0, tag=3)


def test_a_message_of_another_size_is_an_error_on_both_sides(ranks: RankProcesses) -> None:
    sides = ("Rank 0 called send of 8 float32 with tag 3", "rank 1 called recv of 4 float32 with tag 3.")
    told = ranks.run(send_another_size)
    assert [all(side in one.error for side in sides) for one in told] == [True, True, False, False], told
    assert ranks.values(find_backend)[0] == [("shm", "4")]


# -- ends --------------------------------------------------------------------------------------------


def reduce(rank: int) -> None:
    dist.all_reduce(torch.ones(100))


def end_of(hosts: network_hosts.NetworkHosts, killed: list[int]) -> list[Told]:
    """What the other ranks are told when some are killed that the others wait for."""
    with_end = Ranks(hosts)
    try:
        others = [rank for rank in range(RANKS) if rank not in killed]
        with_end.values(reduce)
        with_end.start(reduce, ranks=others)
        time.sleep(0.3)
        for rank in killed:
            with_end.kill(rank, signal.SIGKILL)
        return [with_end.hear(rank, 60) for rank in others]
    finally:
        with_end.stop()


def test_a_rank_killed_on_one_host_is_named_on_both(hosts: network_hosts.NetworkHosts) -> None:
    for told in end_of(hosts, [3]):
        assert "DistBackendError: Rank 3 (process " in told.error, told
        assert ") ended while rank 1 waited for it in all_reduce(SUM) of 100 float32" in told.error


def test_a_leader_killed_is_named_on_both_hosts(hosts: network_hosts.NetworkHosts) -> None:
    for told in end_of(hosts, [1]):
        assert "DistBackendError: Rank 1 (process " in told.error, told
        assert ") ended while rank 3 waited for it in all_reduce(SUM) of 100 float32" in told.error


def test_a_host_that_ends_is_named_with_its_ranks(hosts: network_hosts.NetworkHosts) -> None:
    for told in end_of(hosts, [3, 1]):
        named = "(ranks 1, 3) in all_reduce(SUM) of 100 float32: Connection closed by peer"
        assert "lost the connection to host " in told.error, told
        assert named in told.error or "Rank 3 (process" in told.error, told


def test_a_rank_that_does_not_come_is_named_on_both_hosts(hosts: network_hosts.NetworkHosts) -> None:
    with_end = Ranks(hosts)
    try:
        with_end.values(wait_no_longer_than, 1)  # joining may take longer
        told = with_end.run(reduce, ranks=[0, 1, 2])
        for one in told:
            assert "gave up after 1 s: " in one.error, told
            assert "rank 3 (process " in one.error or "(ranks 1, 3) did not take part" in one.error, told
        (late,) = with_end.run(reduce, ranks=[3])
        assert "gave up after 1 s: " in late.error
    finally:
        with_end.stop()
