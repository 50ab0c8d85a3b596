"""The op of oneCCL: a sum over two ranks where oneCCL is, and a reason where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import acclimate
from acclimate.comm.ccl_op import oneccl_folder
from acclimate.errors import OpBuildError
from rank_processes import RankProcesses


def builder() -> Any:
    found = acclimate.get_accelerator().create_op_builder("CCLCommBuilder")
    assert found is not None
    return found


def test_without_oneccl_it_is_not_compatible_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CCL_ROOT", str(tmp_path))
    assert not builder().is_compatible()
    assert "install the packages oneccl and oneccl-devel" in builder().incompatibility()
    with pytest.raises(OpBuildError, match=r"oneapi/ccl\.hpp"):
        builder().load()


def add(rank: int) -> list[list[float]]:
    op = builder().load()
    for _ in range(2):  # the second does nothing
        op.initialize(2, rank)
    assert (op.get_world_size(), op.get_rank()) == (2, rank)
    sums = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        tensor = torch.full((3, 2), float(rank + 1)).to(dtype).t()
        assert op.inference_all_reduce(tensor) is tensor
        sums.append(tensor.flatten().tolist())
    return sums


@pytest.mark.skipif(oneccl_folder() is None, reason="oneCCL is not installed (packages oneccl, oneccl-devel)")
def test_two_ranks_add_through_oneccl() -> None:
    builder().build()
    with RankProcesses(2, backend="gloo") as ranks:
        assert ranks.values(add) == [[[3.0] * 6] * 4] * 2
