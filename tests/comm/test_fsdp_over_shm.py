"""FSDP2 trains over shared memory as it does over gloo."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rank_processes import RankProcesses

STEPS = 4


def train(rank: int, size: int) -> list[float]:
    """The losses of a small model whose parameters are sharded over the ranks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(24, 24) for _ in range(3)))
    mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.randn(8, 24, generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_fsdp2_has_the_same_losses_as_over_gloo() -> None:
    losses = {}
    for backend in ("shm", "gloo"):
        with RankProcesses(2, backend=backend) as ranks:
            losses[backend] = ranks.values(train, 2)
    assert losses["shm"] == losses["gloo"]
    for of_rank in losses["shm"]:
        assert of_rank[-1] < of_rank[0]
