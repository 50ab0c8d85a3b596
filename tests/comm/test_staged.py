"""The backend ``staged``: ranks on a device for which torch.distributed has no backend."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fresh_process import FreshProcesses
from rank_processes import RankProcesses

DEVICE = "whole"


def make_device(rank: int) -> None:
    """Registers a device written in Python; acclimate has no record of it."""
    sys.path.append(str(Path(__file__).parents[1] / "accelerator"))
    import python_device

    from acclimate.backends.generic import GenericAccelerator

    python_device.register(DEVICE)
    assert GenericAccelerator().communication_backend_name() == "staged"


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses(2, backend="staged", before=make_device) as processes:
        yield processes


def there(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).to(DEVICE)


def here(*tensors: torch.Tensor) -> list[list[float]]:
    assert all(tensor.device.type == DEVICE for tensor in tensors)
    return [tensor.cpu().tolist() for tensor in tensors]


def collectives(rank: int) -> dict[str, Any]:
    own = float(rank + 1)
    told: dict[str, Any] = {}
    summed, sent = there(own, 10 * own), there(own)
    dist.all_reduce(summed)
    dist.broadcast(sent, 1)
    gathered, scattered = [there(0), there(0)], there(0)
    dist.all_gather(gathered, there(own))
    whole, part = there(0, 0), there(0)
    dist.all_gather_into_tensor(whole, there(own))
    dist.reduce_scatter_tensor(part, there(own, 2 * own))
    exchanged = [there(0), there(0)]
    dist.all_to_all(exchanged, [there(own), there(-own)])
    dist.scatter(scattered, [there(5), there(6)] if rank == 0 else None)
    at_root = [there(0), there(0)] if rank == 0 else None
    dist.gather(there(own), at_root)
    told["moved"] = here(summed, sent, *gathered, whole, part, *exchanged, scattered)
    told["at root"] = here(*at_root) if at_root is not None else None
    on_host = torch.tensor([own])
    dist.all_reduce(on_host)
    told["host"] = on_host.tolist()
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    told["objects"] = objects
    dist.barrier()
    return told


def test_every_collective_moves_tensors_of_a_device_without_a_backend(ranks: RankProcesses) -> None:
    first, second = ranks.values(collectives)
    assert first["moved"] == [[3, 30], [2], [1], [2], [1, 2], [3], [1], [2], [5]]
    assert second["moved"] == [[3, 30], [2], [1], [2], [1, 2], [6], [-1], [-2], [6]]
    assert (first["at root"], second["at root"]) == ([[1], [2]], None)
    assert first["host"] == second["host"] == [3]
    assert first["objects"] == second["objects"] == [{"rank": 0}, {"rank": 1}]


def messages(rank: int) -> list[float]:
    received = there(0, 0)
    works = [dist.irecv(received, 1 - rank), dist.isend(there(rank, 7), 1 - rank)]
    for work in works:
        assert work is not None
        work.wait()
    return here(received)[0]


def test_both_ranks_can_send_before_they_receive(ranks: RankProcesses) -> None:
    assert ranks.values(messages) == [[1, 7], [0, 7]]


def asynchronous(rank: int) -> list[list[float]]:
    first, second = there(rank), there(10 * rank)
    works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
    for work in reversed(works):
        assert work is not None
        assert work.get_future().wait()
    return here(first, second)


def test_a_collective_is_complete_when_it_was_waited_for_in_any_order(ranks: RankProcesses) -> None:
    assert ranks.values(asynchronous) == [[[1], [10]]] * 2


def dropped(rank: int) -> list[list[float]]:
    first, second = there(rank), there(10 * rank)
    dist.all_reduce(first, async_op=True)
    dist.all_reduce(second)  # after the first one, so that is complete too
    return here(first, second)


def test_a_collective_whose_work_was_dropped_is_delivered_by_the_next_one(ranks: RankProcesses) -> None:
    assert ranks.values(dropped) == [[[1], [10]]] * 2


def part_of_the_ranks(rank: int) -> list[float]:
    alone = dist.new_group([rank]) if rank == 0 else dist.new_group([0])
    both = dist.new_group([0, 1])
    tensor = there(rank + 1)
    if rank == 0:
        dist.all_reduce(tensor, group=alone)
    dist.all_reduce(tensor, group=both)
    return here(tensor)[0]


def test_groups_of_some_ranks_have_their_own_names(ranks: RankProcesses) -> None:
    assert ranks.values(part_of_the_ranks) == [[3], [3]]


def test_apple_gpus_communicate_through_the_host(fresh: FreshProcesses) -> None:
    outcome = fresh.check("""
import torch.distributed as dist
from acclimate.backends.mps import MPSAccelerator
print(MPSAccelerator().communication_backend_name(), dist.Backend.backend_capability["staged"])
""")
    assert outcome.stdout.strip() == "staged ['mps', 'cpu']"
