"""Groups of ranks on two hosts use gloo, and groups on one of them share memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import network_hosts
import pytest
import torch
import torch.distributed as dist

import acclimate
from ports import free_port
from rank_processes import RankProcesses, wait_no_longer_than

RANKS = 4
pytestmark = pytest.mark.skipif(network_hosts.why_not() is not None, reason=f"{network_hosts.why_not()}")
_groups: list[Any] = []


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
    _groups.extend((dist.group.WORLD, dist.new_group([1, 3])))


def reduced(rank: int) -> tuple[list[float], list[float]]:
    summed, gathered = torch.full((70_000,), float(rank)), torch.empty(RANKS)
    dist.all_reduce(summed)
    dist.all_gather_into_tensor(gathered, torch.ones(1) * rank)
    return sorted(set(summed.tolist())), gathered.tolist()


def test_ranks_of_two_hosts_reduce_and_gather_together(ranks: RankProcesses) -> None:
    assert ranks.values(reduced) == [([6.0], [0.0, 1.0, 2.0, 3.0])] * RANKS


def find_backends(rank: int) -> list[tuple[str, str]]:
    found = []
    for group in _groups:
        if rank in dist.get_process_group_ranks(group):
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            found.append((group._get_backend(torch.device("cpu")).name(), f"{tensor.item():g}"))
    return found


def test_a_group_across_hosts_is_gloos_and_one_on_a_host_shares_memory(ranks: RankProcesses) -> None:
    told = ranks.values(find_backends)
    assert told == [[("gloo", "4")], [("gloo", "4"), ("shm", "2")]] * 2


def reduce(rank: int) -> None:
    dist.all_reduce(torch.ones(100))


@pytest.mark.slow
def test_ranks_of_both_hosts_raise_when_a_rank_has_ended(hosts: network_hosts.NetworkHosts) -> None:
    with_end = Ranks(hosts)
    try:
        with_end.values(reduce)
        with_end.values(wait_no_longer_than, 2)
        with_end.kill(3, signal.SIGKILL)
        for told in with_end.run(reduce, ranks=[0, 1, 2]):
            # gloo tells the rank's neighbours that the connection is closed; others wait for the neighbours.
            assert "Connection" in told.error or "Timed out" in told.error, told
    finally:
        with_end.stop()
