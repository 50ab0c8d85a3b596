"""Optimizers over parameters that FSDP2 has spread over ranks: real ranks, each with its own part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fresh_process import plain_environment
from warm_python import WarmPython

RANK = """
import json, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from acclimate import ops
from acclimate.errors import UnsupportedParameterError

store, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

def train(optimizer_class, sharded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))  # shards of unequal size
    if sharded:
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    for step in range(3):
        batch = torch.randn(8, 7, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()  # the same on both ranks, so their mean is it too
        optimizer.step()
        optimizer.zero_grad()
    if sharded:
        names = optimizer.state[next(model.parameters())]
        assert all(type(names[name]).__name__ == "DTensor" for name in optimizer.state_names)
    return [p.full_tensor() if sharded else p.detach() for p in model.parameters()]

told = {}
for name in ("CPUAdam", "FusedAdam", "CPULion", "CPUAdagrad"):
    whole, spread = (train(getattr(ops, name), sharded) for sharded in (False, True))
    told[name] = max((a - b).abs().max().item() for a, b in zip(whole, spread))
try:
    train(ops.FusedLamb, True)
except UnsupportedParameterError as error:
    told["FusedLamb"] = str(error)
if rank == 0:
    print(json.dumps(told))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> dict[str, object]:
    store: Path = tmp_path_factory.mktemp("sharded") / "store"
    environment = {**plain_environment(), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with warm_python.in_place():
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(store), str(rank)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **environment},
            )
            for rank in range(2)
        ]
    outputs = [rank.communicate(timeout=600) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    answer: dict[str, object] = json.loads(outputs[0][0].splitlines()[-1])  # Gloo of torch 2.10 prints lines
    return answer


@pytest.mark.parametrize("name", ["CPUAdam", "FusedAdam", "CPULion", "CPUAdagrad"])
def test_shards_are_updated_as_the_whole_parameter_is(name: str, told: dict[str, float]) -> None:
    # The gradient is averaged over ranks before, which may round it once.
    assert told[name] < 1e-6


def test_lamb_says_why_it_cannot_update_a_shard(told: dict[str, str]) -> None:
    assert "is sharded over ranks. Use FusedAdam" in told["FusedLamb"]
