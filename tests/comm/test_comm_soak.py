"""Thousands of collectives of random sizes, in two groups at the same time."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rank_processes import RankProcesses

RANKS = 3
COLLECTIVES = 10_000


def soak(rank: int) -> int:
    """Two threads, each with a group; the number of wrong results."""
    groups = [dist.new_group(backend="shm") for _ in range(2)]
    wrong: list[str] = []
    threads = [
        threading.Thread(target=_many, args=(rank, number, group, wrong))
        for number, group in enumerate(groups)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]
    return len(wrong)


def _many(rank: int, number: int, group: Any, wrong: list[str]) -> None:
    draw = random.Random(number)  # the same on all ranks
    try:
        for step in range(COLLECTIVES // 2):
            elements = draw.choice(
                [0, 1, draw.randrange(1, 100), draw.randrange(1, 20_000), draw.randrange(1, 300_000)]
            )
            kind, is_async, root = draw.randrange(4), draw.random() < 0.5, draw.randrange(RANKS)
            tensor = torch.full((elements,), float(rank + step % 7))
            right = float(sum(other + step % 7 for other in range(RANKS)))
            result = tensor
            if kind == 0:
                work = dist.all_reduce(tensor, group=group, async_op=is_async)
            elif kind == 1:
                right = float(root + step % 7)
                work = dist.broadcast(tensor, root, group=group, async_op=is_async)
            elif kind == 2:
                result = torch.empty(RANKS * elements)
                right = float(RANKS - 1 + step % 7)
                work = dist.all_gather_into_tensor(result, tensor, group=group, async_op=is_async)
            else:
                result = torch.empty(elements)
                work = dist.reduce_scatter_tensor(
                    result, tensor.repeat(RANKS), group=group, async_op=is_async
                )
            if work is not None:
                work.wait()
            tail = result[-1:] if kind == 2 else result
            if not bool((tail == right).all()):
                wrong.append(f"group {number}, step {step}, kind {kind}, {elements} elements")
    except RuntimeError as error:
        wrong.append(f"group {number}: {error}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_collectives_in_two_groups_at_once_are_right() -> None:
    with RankProcesses(RANKS) as processes:
        processes.start(soak)
        assert [processes.hear(rank, 800).value for rank in range(RANKS)] == [0] * RANKS


MANY = 64


def with_many(rank: int) -> list[bool]:
    """Which collectives of many ranks were right, of one element and of several slots."""
    right = []
    for elements in (1, 300_000):
        tensor = torch.full((elements,), float(rank))
        dist.all_reduce(tensor)
        right.append(bool((tensor == MANY * (MANY - 1) / 2).all()))
        part = torch.full((elements // MANY + 1,), rank)
        every = torch.empty(MANY * len(part), dtype=part.dtype)
        dist.all_gather_into_tensor(every, part)
        right.append(torch.equal(every, torch.arange(MANY).repeat_interleave(len(part))))
        swapped = torch.empty(MANY)
        dist.all_to_all_single(swapped, torch.full((MANY,), float(rank)))
        right.append(torch.equal(swapped, torch.arange(float(MANY))))
    dist.barrier()
    return right


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_collectives_of_64_ranks_on_fewer_cores_are_right() -> None:
    with RankProcesses(MANY, timeout_s=300) as processes:
        assert processes.values(with_many) == [[True] * 6] * MANY
