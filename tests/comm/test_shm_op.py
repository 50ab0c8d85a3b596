"""The op ``inference_all_reduce`` does what DeepSpeed's op does, for every dtype and layout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import acclimate
from ports import free_port
from rank_processes import RankProcesses

DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8,
    torch.bool,
)  # fmt: skip


def load() -> Any:
    builder = acclimate.get_accelerator().create_op_builder("ShareMemCommBuilder")
    assert builder is not None
    return builder.load()


def initialize(rank: int, size: int) -> None:
    op = load()
    for _ in range(2):  # the second does nothing
        op.initialize(size, rank)
    assert (op.get_world_size(), op.get_rank()) == (size, rank)


def own(rank: int, dtype: torch.dtype, elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 2 if dtype == torch.bool else 30, (elements,), generator=generator).to(dtype)


def add(rank: int, size: int, elements: int) -> list[str]:
    op = load()
    wrong = []
    for dtype in DTYPES:
        every = [own(other, dtype, elements) for other in range(size)]
        if dtype == torch.bool:
            right = torch.stack(every).any(0)
        else:
            wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
            right = torch.stack([tensor.to(wide) for tensor in every]).sum(0).to(dtype)
        spread = torch.zeros(elements, 2, dtype=dtype)[:, 0]
        for tensor in (own(rank, dtype, elements), spread.copy_(own(rank, dtype, elements))):
            result = op.inference_all_reduce(tensor)
            if not (torch.equal(tensor, right) and torch.equal(result, right)):
                wrong.append(f"{dtype}, strides {tensor.stride()}: {tensor[:5]} where {right[:5]} is right")
    return wrong


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with RankProcesses(3, backend=None, environment=where) as processes:
        processes.values(initialize, 3)
        yield processes


@pytest.mark.parametrize("elements", [0, 1, 7, 640, 70_001])
def test_tensors_of_every_dtype_and_layout_are_summed(ranks: RankProcesses, elements: int) -> None:
    assert ranks.values(add, 3, elements) == [[]] * 3


def compiled(rank: int) -> list[float]:
    op = load()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(x: torch.Tensor) -> torch.Tensor:
        partial = x * 2
        torch.ops.acclimate.inference_all_reduce_(partial)
        return partial + 1

    del op
    return layer(torch.full((4,), float(rank))).tolist()


def test_the_operator_runs_inside_a_compiled_graph(ranks: RankProcesses) -> None:
    assert ranks.values(compiled) == [[7.0] * 4] * 3


def different(rank: int) -> None:
    load().inference_all_reduce(torch.ones(5 + rank // 2))


def test_different_sizes_are_an_error_on_every_rank(ranks: RankProcesses) -> None:
    for told in ranks.run(different):
        assert (
            "Rank 0 called all_reduce(SUM) of 5 float32, but rank 2 called all_reduce(SUM) of 6" in told.error
        )
    assert ranks.values(add, 3, 3) == [[]] * 3


def test_a_rank_outside_the_group_is_an_error() -> None:
    with pytest.raises(ValueError, match="rank is 2, but must be from 0 to 1"):
        load().initialize(2, 2)


@pytest.mark.parametrize(
    "numbers",
    [(0, 1, 1), (257, 1, 1), (1 << 32, 1, 1), (2, 1 << 62, 1), (2, -1, 1), (2, 1, 1 << 62), (2, 1, 0)],
)
def test_numbers_whose_memory_could_not_exist_are_an_error(numbers: tuple[int, int, int]) -> None:
    load()
    with pytest.raises(RuntimeError, match=r"a group has 1 to 256 ranks|slots and rings have"):
        torch.ops.acclimate.shm_comm_bytes(*numbers)
    ranks, slot, ring = numbers
    with pytest.raises(
        RuntimeError, match=r"has 1 to 256 ranks|slots and rings have|the rank must be from 0"
    ):
        torch.ops.acclimate.shm_comm_open(0, ranks, [1] * min(ranks, 300), slot, ring, 1000, True, 0)


def through_gloo(rank: int, where: dict[str, str]) -> list[float]:
    os.environ.update(where)
    op = load()
    op.initialize(2, rank)
    return op.inference_all_reduce(torch.ones(2, 3).t() * (rank + 1)).flatten().tolist()


def test_without_a_compiler_it_gives_the_same_through_gloo(tmp_path: Any) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    nothing = {"ACCLIMATE_CACHE": str(tmp_path), "CXX": "", "PATH": str(tmp_path)}
    with RankProcesses(2, backend=None, environment=nothing) as processes:
        assert processes.values(through_gloo, where) == [[3.0] * 6] * 2


def test_deepspeed_is_told_that_the_op_reduces_every_dtype() -> None:
    assert load().vector_kernel_level() == 2
