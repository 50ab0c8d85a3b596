"""Split models over real processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch.distributed as dist
from rank_process import row

from rank_processes import RankProcesses


@pytest.fixture(scope="module")
def two() -> Iterator[RankProcesses]:
    with RankProcesses(2, backend="gloo", models=True) as ranks:
        yield ranks


def compare(rank: int, name: str) -> dict[str, Any]:
    return row(name, 2, {}, dist.group.WORLD)


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("llama", marks=pytest.mark.slow)])
def test_two_processes_give_the_text_of_one(two: RankProcesses, name: str) -> None:
    for found in two.values(compare, name):
        assert found["same_text"], found
        assert found["error"] < 1e-4
        assert found["share"] <= 0.60
