"""Two processes, one sim device each: every collective, and the wrappers built on them."""

from __future__ import annotations

import copy
import gc
import sys
import tempfile
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from acclimate import get_accelerator

WORLD = 2


def rank_main(rank: int, store_path: str) -> None:
    warnings.simplefilter("ignore")
    acc = get_accelerator()
    torch.set_num_threads(1)
    acc.set_device(rank)
    store = dist.FileStore(store_path, WORLD)
    dist.init_process_group(
        acc.communication_backend_name(),
        store=store,
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    device = acc.current_device_name()
    check_collectives(rank, device)
    check_data_parallel(rank, device)
    check_fully_sharded(rank, device)
    check_dtensor(device)
    check_sync_batch_norm(rank, device)
    # A model of DDP that is collected later holds the last reference to the group, whose end then waits,
    # with the GIL, for a thread that waits for the GIL.
    gc.collect()
    dist.destroy_process_group()
    check_group_without_a_name(rank, device, dist.PrefixStore("without a name", store))
    sys.stdout.write("passed\n")


def full(value: float, device: str) -> torch.Tensor:
    return torch.full((2,), float(value), device=device)


def same(found: torch.Tensor, *expected: float) -> None:
    assert found.device.type == "sim", found.device
    assert found.flatten().tolist() == list(expected), (found, expected)


def check_collectives(rank: int, device: str) -> None:
    tensor = full(rank + 1, device)
    dist.all_reduce(tensor)
    same(tensor, 3, 3)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    same(tensor, 6, 6)
    tensor = full(rank + 5, device)
    dist.broadcast(tensor, 1)
    same(tensor, 6, 6)
    parts = [full(-1, device) for _ in range(WORLD)]
    dist.all_gather(parts, full(rank, device))
    same(torch.cat(parts), 0, 0, 1, 1)
    gathered = torch.empty(4, device=device)
    dist.all_gather_into_tensor(gathered, full(rank, device))
    same(gathered, 0, 0, 1, 1)
    in_a_row = torch.empty(1, 4, device=device)
    dist.all_gather_into_tensor(in_a_row, full(rank, device))
    same(in_a_row, 0, 0, 1, 1)
    piece = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(piece, torch.arange(4.0, device=device))
    same(piece, *([0, 2] if rank == 0 else [4, 6]))
    swapped = torch.empty(4, device=device)
    dist.all_to_all_single(swapped, torch.arange(4.0, device=device) + 10 * rank)
    same(swapped, *([0, 1, 10, 11] if rank == 0 else [2, 3, 12, 13]))
    dist.reduce(tensor, 0)
    if rank == 0:
        same(tensor, 12, 12)
        dist.send(full(7, device), 1)
    else:
        dist.recv(tensor, 0)
        same(tensor, 7, 7)
    whole = torch.arange(6, dtype=torch.int64, device=device)[::2]  # not contiguous
    dist.all_reduce(whole, op=dist.ReduceOp.MAX)
    same(whole, 0, 2, 4)
    on_host = torch.ones(2)
    dist.all_reduce(on_host)
    assert on_host.tolist() == [2, 2]
    names: list[str | None] = [None] * WORLD
    dist.all_gather_object(names, device)
    assert names == ["sim:0", "sim:1"]
    dist.barrier()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def reference_gradient(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    reference = copy.deepcopy(net)
    (reference(batch).sum() / WORLD).backward()
    gradient = reference[0].weight.grad
    assert gradient is not None
    return gradient


def check_data_parallel(rank: int, device: str) -> None:
    net, batch = model(), torch.arange(8.0).view(2, 4)
    expected = reference_gradient(net, batch)
    wrapped = nn.parallel.DistributedDataParallel(net.to(device), device_ids=[rank])
    wrapped(batch[rank : rank + 1].to(device)).sum().backward()
    torch.testing.assert_close(wrapped.module[0].weight.grad.cpu(), expected)


def check_fully_sharded(rank: int, device: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net, batch = model(), torch.arange(8.0).view(2, 4)
    expected = reference_gradient(net, batch)
    mesh = init_device_mesh("sim", (WORLD,))
    net.to(device)
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    net(batch[rank : rank + 1].to(device)).sum().backward()
    torch.testing.assert_close(net[0].weight.grad.full_tensor().cpu(), expected)
    optimizer.step()


def check_dtensor(device: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = torch.arange(8.0).view(4, 2)
    sharded = distribute_tensor(whole.to(device), init_device_mesh("sim", (WORLD,)), [Shard(0)])
    product = sharded @ sharded.t().redistribute(placements=[Replicate()])
    torch.testing.assert_close(product.full_tensor().cpu(), whole @ whole.t())


def check_sync_batch_norm(rank: int, device: str) -> None:
    """On parts of different sizes it is a batch norm of the whole batch, also backward."""
    for shape, dtype, affine in (
        ((5, 3, 2, 2), torch.float32, True),
        ((5, 3), torch.float32, False),
        ((5, 3, 4), torch.bfloat16, True),
    ):
        torch.manual_seed(1)
        kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
        expected, whole, weights = kind(3, affine=affine), torch.randn(shape) + 2, torch.randn(shape)
        net = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(expected)).to(device)
        mine = slice(0, 2) if rank == 0 else slice(2, 5)
        part = whole[mine].to(device, dtype).requires_grad_()
        whole.requires_grad_()
        for _ in range(2):
            result, right = net(part), expected(whole.to(dtype).float())
        (result * weights[mine].to(device, dtype)).sum().backward()
        (right * weights).sum().backward()
        within = {"rtol": 0.05, "atol": 0.05} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        assert result.dtype is part.grad.dtype is dtype
        torch.testing.assert_close(result.cpu().float(), right[mine], **within)
        torch.testing.assert_close(part.grad.cpu().float(), whole.grad[mine], **within)
        torch.testing.assert_close(net.running_mean.cpu(), expected.running_mean, **within)
        torch.testing.assert_close(net.running_var.cpu(), expected.running_var, **within)
        for parameter, of_whole in zip(net.parameters(), expected.parameters(), strict=True):
            dist.all_reduce(parameter.grad)  # each rank has the sum over its own part
            torch.testing.assert_close(parameter.grad.cpu(), of_whole.grad, **within)


def check_group_without_a_name(rank: int, device: str, store: dist.Store) -> None:
    dist.init_process_group(store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    net = nn.parallel.DistributedDataParallel(nn.Linear(2, 1).to(device))
    net(torch.full((1, 2), float(rank)).to(device)).sum().backward()
    assert net.module.weight.grad.tolist() == [[0.5, 0.5]]
    for tensor in (torch.ones(2), torch.ones(2).to(device)):
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0, 2.0]
    dist.destroy_process_group()


if __name__ == "__main__":
    get_accelerator()  # builds the library once, not in each rank
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (f"{folder}/store",), nprocs=WORLD, start_method="fork")
