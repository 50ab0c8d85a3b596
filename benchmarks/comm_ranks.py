"""One rank of benchmarks/comm.py, in the Python that has the peers too: prints its figures as JSON."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

ELEMENTS = (640, 4096, 65_536, 1 << 20, 1 << 24)
DTYPES = (torch.bfloat16, torch.float32)
BURST_S = 0.0003
ONLY_A_BARRIER = "DDP, only a barrier"
SILENT = ("DDP, no communication", ONLY_A_BARRIER)
LOOP = 100
MOST_BURSTS, FEWEST_BURSTS, LONGEST_S = 300, 25, 3.0


def main() -> None:
    what, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    if size == 2:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import acclimate

    acclimate.init_distributed("shm")
    gloo = dist.new_group(backend="gloo")
    figures = {"op": op, "backend": backend, "many": many, "ddp": ddp}[what](rank, size, gloo)
    if rank == 0:
        print("\n" + json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def interleaved(works: dict[str, Callable[[], Any]], burst_s: float = BURST_S) -> dict[str, float]:
    """Seconds a call of each, in bursts that take turns: the tenth part of the bursts was faster."""
    counts, times = {}, {}
    for name, work in works.items():
        work()
        dist.barrier()
        start = time.perf_counter()
        work()
        shortest_s = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(shortest_s, dist.ReduceOp.MIN)  # all ranks have to call as often
        counts[name] = max(1, min(100, int(burst_s / shortest_s.item())))
        times[name] = []
    is_over = torch.zeros(1)
    begin = time.perf_counter()
    while not is_over:
        for name, work in works.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(counts[name]):
                work()
            times[name].append((time.perf_counter() - start) / counts[name])
        is_late = time.perf_counter() - begin > LONGEST_S and len(times[name]) >= FEWEST_BURSTS
        is_over.fill_(float(is_late or len(times[name]) == MOST_BURSTS))
        dist.all_reduce(is_over, dist.ReduceOp.MAX)
    return {name: sorted(bursts)[len(bursts) // 10] for name, bursts in times.items()}


def op(rank: int, size: int, gloo: Any) -> list[dict[str, Any]]:
    """Sums over ranks as a native operator: ours, DeepSpeed's and vLLM's."""
    from acclimate import get_accelerator

    ours = get_accelerator().create_op_builder("ShareMemCommBuilder").load()
    ours.initialize(size, rank)
    deepspeed, vllm = deepspeed_op(rank, size), vllm_op(rank, size)
    figures = []
    for dtype in DTYPES:
        for elements in ELEMENTS:
            tensor = torch.zeros(elements, dtype=dtype)
            works = {
                "acclimate": lambda x=tensor: torch.ops.acclimate.inference_all_reduce_(x),
                "DeepSpeed": lambda x=tensor: deepspeed(x),
                "vLLM": lambda x=tensor: vllm(x),
            }
            figures.append(figure("all_reduce, native op", dtype, elements, interleaved(works)))
    return figures


def deepspeed_op(rank: int, size: int) -> Callable[[torch.Tensor], Any]:
    os.environ["LOCAL_SIZE"] = str(size)
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    module = ShareMemCommBuilder().load(verbose=False)
    module.initialize(size, rank)
    return torch.ops.deepspeed.inference_all_reduce_


def vllm_op(rank: int, size: int) -> Callable[[torch.Tensor], Any]:
    torch.ops.load_library(sys.argv[4])
    name = f"acclimate-benchmark-{os.environ['MASTER_PORT']}"
    handle = torch.ops._C.init_shm_manager(name, size, rank, torch.get_num_threads())
    dist.barrier()
    torch.ops._C.join_shm_manager(handle, name)
    dist.barrier()
    return lambda tensor: torch.ops._C.shm_allreduce(handle, tensor)


def backend(rank: int, size: int, gloo: Any) -> list[dict[str, Any]]:
    """torch.distributed's collectives: ours and gloo's."""
    figures = []
    for elements in ELEMENTS:
        for name, work in collectives(elements, size).items():
            works = {
                "acclimate": lambda run=work: run(None),
                "gloo": lambda run=work: run(gloo),
            }
            figures.append(figure(name, torch.bfloat16, elements, interleaved(works)))
    return figures


def collectives(elements: int, size: int) -> dict[str, Callable[[Any], Any]]:
    part = torch.zeros(elements, dtype=torch.bfloat16)
    whole = torch.zeros(elements * size, dtype=torch.bfloat16)
    other = torch.zeros_like(whole)
    return {
        "all_reduce": lambda group: dist.all_reduce(part, group=group),
        "all_gather": lambda group: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_tensor(part, whole, group=group),
        "broadcast": lambda group: dist.broadcast(part, 0, group=group),
        "all_to_all": lambda group: dist.all_to_all_single(other, whole, group=group),
    }


def many(rank: int, size: int, gloo: Any) -> list[dict[str, Any]]:
    """One element over more ranks than cores, called from Python and from a loop of TorchScript.

    A core goes from rank to rank at each call. Python's own work for a call takes the longer, the colder the
    core's caches are.
    """
    from acclimate import get_accelerator

    ours = get_accelerator().create_op_builder("ShareMemCommBuilder").load()
    ours.initialize(size, rank)
    tensor = torch.zeros(1)
    scripted = torch.jit.script(sum_often)
    callers = {
        "Python": (1, lambda: torch.ops.acclimate.inference_all_reduce_(tensor)),
        "TorchScript": (LOOP, lambda: scripted(tensor, LOOP)),
    }
    figures = []
    for caller, (calls, work) in callers.items():
        # Ranks that share cores leave a barrier one after the other, which a longer burst makes up for.
        best = interleaved({"acclimate": work}, burst_s=10 * BURST_S)
        per_call = {name: seconds / calls for name, seconds in best.items()}
        figures.append(
            figure(f"all_reduce, native op, {size} ranks, from {caller}", tensor.dtype, 1, per_call)
        )
    return figures


def sum_often(x: torch.Tensor, times: int) -> None:
    for _ in range(times):
        torch.ops.acclimate.inference_all_reduce_(x)


def ddp(rank: int, size: int, gloo: Any) -> list[dict[str, Any]]:
    """A training step of a 50 M-parameter model; also in DDP that sends no gradients, and without DDP.

    A step that only waits for the other rank at its end shows how much of the time is waiting.
    """
    return [ddp_figure(rank, gloo, as_views) for as_views in (False, True)]


def ddp_figure(rank: int, gloo: Any, as_views: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]
    data = torch.randn(16, 2048, generator=torch.Generator().manual_seed(rank))
    losses: dict[str, list[float]] = {}

    def step_of(name: str, group: Any) -> Callable[[], Any]:
        model: torch.nn.Module = copy.deepcopy(torch.nn.Sequential(*layers))
        if name != "no DDP":
            model = torch.nn.parallel.DistributedDataParallel(
                model, process_group=group, gradient_as_bucket_view=as_views
            )
        if name in SILENT:
            # Without annotations, which torch would want to be its types and not their names.
            model.register_comm_hook(None, lambda _, bucket: as_future(bucket.buffer()))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        losses[name] = []

        def step() -> None:
            optimizer.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            if name == ONLY_A_BARRIER:
                dist.barrier()
            losses[name].append(loss.item())

        return step

    groups = {"acclimate": None, "gloo": gloo, **dict.fromkeys(SILENT), "no DDP": None}
    best = interleaved({name: step_of(name, group) for name, group in groups.items()})
    work = "DDP step of 50 M parameters" + (", gradients as views" if as_views else "")
    told = figure(work, torch.float32, 50_356_224, best)
    return told | {"same losses": losses["acclimate"] == losses["gloo"]}


def as_future(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(tensor)
    return done


def figure(work: str, dtype: torch.dtype, elements: int, best: dict[str, float]) -> dict[str, Any]:
    microseconds = {name: seconds * 1e6 for name, seconds in best.items()}
    return {"work": work, "dtype": str(dtype)[6:], "elements": elements, "microseconds": microseconds}


if __name__ == "__main__":
    main()
