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
from rank_processes import RankProcesses, Told

import acclimate

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


def join(rank: int, port: int, timeout_s: float) -> str:
    acclimate.init_distributed(
        init_method=f"tcp://{network_hosts.ADDRESSES[0]}:{port}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=timeout_s),
    )
    return str(dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).name())


class Ranks(RankProcesses):
    """Ranks 0 and 2 on one host, 1 and 3 on the other."""

    def __init__(self, hosts: network_hosts.NetworkHosts, timeout_s: float = 60) -> None:
        super().__init__(RANKS, backend=None, environment={"PLACES": ",".join(hosts.places)}, before=move)
        for told in self.joined():
            assert not told.error, told
        self.backends = self.values(join, network_hosts.free_port(), timeout_s)


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
