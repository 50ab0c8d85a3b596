"""Split models over real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from rank_group import RankGroup

from warm_python import WarmPython


@pytest.fixture(scope="module")
def two_ranks(warm_python: WarmPython) -> Iterator[RankGroup]:
    with warm_python.in_place(), RankGroup(2) as ranks:
        yield ranks


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_two_processes_give_the_text_of_one(two_ranks: RankGroup, name: str) -> None:
    found = two_ranks.compare(name)
    assert found.get("same_text"), found
    assert found["error"] < 1e-4
    assert found["share"] <= 0.60
