"""Topics of ranks: training with what torch builds on collectives, and messages from any rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn

from acclimate.imports import describe
from acclimate_conformance.checks.assertions import is_host
from acclimate_conformance.checks.communication.observer import Observer
from acclimate_conformance.checks.dtypes.arithmetic import numbers

_RATE = 0.125


def _there(here: Observer, *shape: int, seed: int = 0) -> torch.Tensor:
    return numbers(*shape, seed=seed).float().to(here.accelerator.current_device_name())


def _near(here: Observer, found: torch.Tensor, wanted: torch.Tensor, what: str, within: float = 2e-3) -> None:
    ours, theirs = found.detach().cpu().double(), wanted.detach().cpu().double()
    if ours.shape != theirs.shape:
        here.holds(False, f"{what} has the shape {tuple(ours.shape)}, not {tuple(theirs.shape)}")
        return
    apart = float((ours - theirs).abs().max()) if ours.numel() else 0.0
    here.holds(apart <= within * max(1.0, float(theirs.abs().max())), f"{what} is off by {apart:.1e}")


class _Mixed(nn.Module):
    """Parameters of two dtypes, and buffers of four."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.inner = nn.Linear(5, 4)
        self.outer = nn.Linear(4, 3).bfloat16()
        self.counts: torch.Tensor
        for name, buffer in {
            "counts": torch.arange(3) + 10 * rank,
            "mask": torch.tensor([rank == 0, True, False]),
            "scale": torch.full((3,), rank + 1.0),
            "shift": torch.full((2,), rank + 0.5).bfloat16(),
        }.items():
            self.register_buffer(name, buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.outer(self.inner(x).relu().bfloat16()).float()
        return found


def models_of_every_kind_train(here: Observer) -> None:
    """DistributedDataParallel with dtypes, hooks and options; batch norms of all ranks; sharded models."""
    device = here.accelerator.current_device_name()
    here.optional("DistributedDataParallel of several dtypes", lambda: _mixed(here, device))
    here.optional("DistributedDataParallel with hooks", lambda: _hooked(here, device))
    here.optional("DistributedDataParallel of uneven inputs", lambda: _joined(here, device))
    here.optional("SyncBatchNorm", lambda: _normed(here, device))
    here.optional("collectives with gradients", lambda: _differentiable(here))
    here.optional("fully_shard", lambda: _sharded(here, device))
    here.optional("fully_shard with options", lambda: _sharded_otherwise(here, device))
    here.optional("FullyShardedDataParallel", lambda: _sharded_flat(here, device))
    here.optional("ZeroRedundancyOptimizer", lambda: _without_redundancy(here, device))
    here.optional("torch.distributed.checkpoint", lambda: _saved_in_parts(here, device))


def _mixed(here: Observer, device: str) -> None:
    model = _Mixed(here.number).to(device)
    first = _Mixed(0)
    together = nn.parallel.DistributedDataParallel(model)
    for name, value in model.state_dict().items():
        here.same(
            value, first.state_dict()[name], f"{name} of rank 0 in DistributedDataParallel of several dtypes"
        )
    for turn in range(2):
        with torch.no_grad():
            model.counts.add_(here.number)
        together(_there(here, 6, 5, seed=here.number + turn)).sum().backward()
    here.same(model.counts, first.counts, "integers of rank 0 in DistributedDataParallel, after two steps")
    for parameter in model.parameters():
        every = [torch.zeros_like(parameter) for _ in here.ranks]
        distributed.all_gather(every, parameter.grad if parameter.grad is not None else parameter)
        for other in every[1:]:
            here.same(other, every[0].cpu(), "a gradient in DistributedDataParallel, on each rank,")


def _hooked(here: Observer, device: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    torch.manual_seed(1)
    start = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for number, parameter in enumerate(start.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=number).float() / 4)
    reference = copy.deepcopy(start)
    for rank in here.ranks:
        (reference(numbers(6, 5, seed=rank).float()).square().mean() / here.count).backward()
    hooks: dict[str, Callable[[Any], object]] = {
        "no hook": lambda ddp: None,
        "static_graph": lambda ddp: ddp._set_static_graph(),
        "allreduce_hook": lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
        "fp16_compress_hook": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
    }
    for name, register in hooks.items():
        model = copy.deepcopy(start).to(device)
        together = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        try:
            register(together)
            for _ in range(2):
                together.zero_grad()
                together(_there(here, 6, 5, seed=here.number)).square().mean().backward()
        except NotImplementedError as error:
            here.lacking.append(f"{name} of DistributedDataParallel: {describe(error)}")
            continue
        for (of, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            what = f"the gradient of {of} in DistributedDataParallel with {name}"
            here.holds(ours.grad is not None, f"{what} is absent")
            if ours.grad is not None and theirs.grad is not None:
                _near(here, ours.grad, theirs.grad, what, 2e-2)


def _joined(here: Observer, device: str) -> None:
    """Ranks with fewer samples than others take part until all have none left; all end with one model."""
    reference = _model(here)
    for turn in range(here.count + 1):
        reference.zero_grad()
        for rank in here.ranks:
            if turn <= rank:
                loss = reference(numbers(4, 7, seed=10 * turn + rank).float()).square().mean()
                (loss / here.count).backward()
        with torch.no_grad():
            for parameter in reference.parameters():
                if parameter.grad is not None:
                    parameter.sub_(_RATE * parameter.grad)
    model = _model(here).to(device)
    together = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    with together.join():
        for turn in range(here.number + 1):
            optimizer.zero_grad()
            together(_there(here, 4, 7, seed=10 * turn + here.number)).square().mean().backward()
            optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        _near(here, ours, theirs, f"{name} in DistributedDataParallel after join() of uneven inputs")


def _normed(here: Observer, device: str) -> None:
    """A batch norm of all ranks is one of all their samples, of which each rank has another number."""
    if is_host(here.accelerator):
        raise NotImplementedError("SyncBatchNorm is not for hosts")
    layer = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(3)).to(device).train()
    whole = nn.BatchNorm2d(3).train()
    rows = [numbers(r + 1, 3, 4, 4, seed=r).float() for r in here.ranks]
    weights = [numbers(r + 1, 3, 4, 4, seed=9 + r).float() for r in here.ranks]
    every = [row.clone().requires_grad_() for row in rows]
    wanted = whole(torch.cat(every)).split([len(row) for row in rows])
    torch.autograd.backward(wanted, weights)
    mine = rows[here.number].to(device).requires_grad_()
    found = layer(mine)
    found.backward(weights[here.number].to(device))
    _near(here, found, wanted[here.number], "SyncBatchNorm")
    if mine.grad is not None:
        _near(here, mine.grad, every[here.number].grad, "the gradient of SyncBatchNorm")  # type: ignore[arg-type]
    _near(here, layer.running_var, whole.running_var, "running_var of SyncBatchNorm")  # type: ignore[arg-type]
    _near(here, layer.running_mean, whole.running_mean, "running_mean of SyncBatchNorm")  # type: ignore[arg-type]


def _differentiable(here: Observer) -> None:
    from torch.distributed.nn import functional

    mine = _there(here, 3, seed=here.number).requires_grad_()
    total = functional.all_reduce(mine * 2)
    (total * (here.number + 1)).sum().backward()
    rows = [numbers(3, seed=r).float() for r in here.ranks]
    here.same(total.detach(), torch.stack(rows).sum(0) * 2, "all_reduce with a gradient")
    if mine.grad is not None:
        wanted = torch.full((3,), 2.0 * sum(r + 1 for r in here.ranks))
        here.same(mine.grad, wanted, "the gradient of all_reduce")
    other = _there(here, 3, seed=here.number).requires_grad_()
    gathered = functional.all_gather(other)
    sum(part.sum() * (r + 1 + here.number) for r, part in enumerate(gathered)).backward()
    if other.grad is not None:
        wanted = torch.full((3,), float(sum(here.number + 1 + r for r in here.ranks)))
        here.same(other.grad, wanted, "the gradient of all_gather")


def _model(here: Observer) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=number).float() / 4)
    return made


def _trained(here: Observer, steps: int) -> nn.Sequential:
    """The same model, trained on the samples of all ranks in this process."""
    model = _model(here)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in here.ranks:
            (model(numbers(4, 7, seed=10 * step + rank).float()).square().mean() / here.count).backward()
        optimizer.step()
    return model


def _sharded(here: Observer, device: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    try:
        mesh = init_device_mesh(here.accelerator.device_type, (here.count,))
    except AttributeError as error:  # it asks torch's module for the device for what not all have
        raise NotImplementedError(describe(error)) from error
    if not hasattr(here.accelerator.torch_module, "Stream"):  # fully_shard gathers on streams that it makes
        raise NotImplementedError("fully_shard needs streams, and torch's module for the device has none")
    wanted = _trained(here, 2)
    for again in (True, False):
        model = _model(here).to(device)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=again)
        optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.5)
        for step in range(2):
            optimizer.zero_grad()
            model(_there(here, 4, 7, seed=10 * step + here.number)).square().mean().backward()
            optimizer.step()
        for (name, ours), theirs in zip(model.named_parameters(), wanted.parameters(), strict=True):
            whole: Any = ours
            _near(here, whole.full_tensor(), theirs, f"{name} of a model of fully_shard after two steps")


def _sharded_otherwise(here: Observer, device: str) -> None:
    """Models whose parameters are gathered in 16 bits, are kept on the host, or lie apart in several ways."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    if not hasattr(here.accelerator.torch_module, "Stream"):
        raise NotImplementedError("fully_shard needs streams, and torch's module for the device has none")
    try:
        mesh = init_device_mesh(here.accelerator.device_type, (here.count,))
    except AttributeError as error:
        raise NotImplementedError(describe(error)) from error
    wanted = _trained(here, 2)
    ways: dict[str, dict[str, Any]] = {
        "parameters in bfloat16": {
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        },
        "parameters on the host": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "parts of another dimension": {"shard_placement_fn": lambda p: Shard(p.dim() - 1)},
    }
    for way, options in ways.items():
        torch.manual_seed(0)
        model = _model(here)
        if "offload_policy" not in options:
            model = model.to(device)
        if "shard_placement_fn" in options and any(p.shape[-1] % here.count for p in model.parameters()):
            continue  # torch takes parts of one size only
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.5)
        for step in range(2):
            optimizer.zero_grad()
            model(_there(here, 4, 7, seed=10 * step + here.number)).float().square().mean().backward()
            optimizer.step()
        within = 3e-2 if "mp_policy" in options else 2e-3
        for (name, ours), theirs in zip(model.named_parameters(), wanted.parameters(), strict=True):
            shard: Any = ours
            whole = shard.to(device).full_tensor()
            _near(
                here, whole, theirs, f"{name} of a model of fully_shard with {way}, after two steps", within
            )


def _sharded_flat(here: Observer, device: str) -> None:
    """The older kind of sharded models, whose parameters are parts of one flat tensor."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if is_host(here.accelerator):
        raise NotImplementedError("FullyShardedDataParallel needs an accelerator")
    wanted = _trained(here, 2)
    try:
        model: Any = FullyShardedDataParallel(
            _model(here).to(device), device_id=torch.device(device), use_orig_params=True
        )
    except (AttributeError, AssertionError) as error:  # what it asks torch's module for
        raise NotImplementedError(describe(error)) from error
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.5)
    for step in range(2):
        optimizer.zero_grad()
        model(_there(here, 4, 7, seed=10 * step + here.number)).square().mean().backward()
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        for number, (ours, theirs) in enumerate(zip(model.parameters(), wanted.parameters(), strict=True)):
            _near(here, ours, theirs, f"parameter {number} of FullyShardedDataParallel after two steps")


def _saved_in_parts(here: Observer, device: str) -> None:
    """Sharded and whole tensors that all ranks save together, and load into other parts."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    try:
        mesh = init_device_mesh(here.accelerator.device_type, (here.count,))
    except AttributeError as error:  # it asks torch's module for the device for what not all have
        raise NotImplementedError(describe(error)) from error
    rows = torch.arange(4.0 * here.count + 8).view(-1, 4)

    def state(factor: float, *placed: Any) -> dict[str, Any]:
        return {
            f"part {number}": distribute_tensor((rows + number).to(device) * factor, mesh, [place])
            for number, place in enumerate(placed)
        } | {"whole": torch.full((3,), 7 * factor, device=device).to(torch.int64)}

    folder = str(here.folder / "checkpoint")
    saved, into = state(1, Shard(0), Shard(1), Replicate()), state(0, Shard(1), Replicate(), Shard(0))
    try:
        save(saved, checkpoint_id=folder)
        load(into, checkpoint_id=folder)
    except CheckpointException as error:
        raise RuntimeError(describe(error)) from error
    for number in range(3):
        told = f"part {number} of torch.distributed.checkpoint, loaded into other parts"
        here.same(into[f"part {number}"].full_tensor(), rows + number, told)
    here.same(into["whole"], [7.0] * 3, "an integer tensor of torch.distributed.checkpoint")
    on = str(into["whole"].device)
    here.holds(
        on == str(torch.empty(0, device=device).device), f"what torch.distributed.checkpoint loads is on {on}"
    )


def _without_redundancy(here: Observer, device: str) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wanted, model = _trained(here, 2), _model(here).to(device)
    together = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=_RATE, momentum=0.5)
    for step in range(2):
        optimizer.zero_grad()
        together(_there(here, 4, 7, seed=10 * step + here.number)).square().mean().backward()
        optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), wanted.parameters(), strict=True):
        _near(here, ours, theirs, f"{name} with ZeroRedundancyOptimizer after two steps")


def messages_one_by_one(here: Observer) -> None:
    """isend and irecv, messages with tags, and from any rank, where the backend has these."""
    if here.count < 2:
        return

    def waited() -> None:
        after, before = (here.ranks[(here.place + step) % here.count] for step in (1, -1))
        received = [here.full(5 + n, -1) for n in range(3)]
        works = [distributed.irecv(tensor, before) for tensor in received]
        sent = [here.full(5 + n, 10 * here.number + n) for n in range(3)]
        works += [distributed.isend(tensor, after) for tensor in sent]
        for work in reversed(works):
            here.holds(work is not None, "isend or irecv returns nothing to wait for")
            if work is not None:
                work.wait()
        here.accelerator.synchronize()
        for n, tensor in enumerate(received):
            here.same(tensor, torch.full((5 + n,), 10.0 * before + n), f"irecv of message {n + 1} of 3")

    def tagged() -> None:
        if here.is_of_a_vendor:
            raise NotImplementedError("the backend has no tags")
        for first, second in ((7, 3), (3, 7)):
            if here.number == 0:
                works = [distributed.isend(here.full(4, tag), 1, tag=tag) for tag in (first, second)]
                for work in works:
                    if work is not None:
                        work.wait()
            elif here.number == 1:
                for tag in (3, 7):
                    found = here.full(4, -1)
                    distributed.recv(found, 0, tag=tag)
                    here.same(found, torch.full((4,), float(tag)), f"recv with tag={tag}")

    def from_anyone() -> None:
        if here.is_of_a_vendor:
            raise NotImplementedError("the backend receives from a named rank only")
        for root in here.ranks[:2]:
            if here.number == root:
                senders = []
                for _ in here.ranks[1:]:
                    found = here.full(3, -1)
                    sender = distributed.recv(found)
                    senders.append(sender)
                    here.same(
                        found, torch.full((3,), float(sender)), f"recv from any rank, by rank {sender},"
                    )
                others = [r for r in here.ranks if r != root]
                here.holds(sorted(senders) == others, f"recv from any rank tells the ranks {senders}")
            else:
                distributed.send(here.full(3, here.number), root)
            distributed.barrier()

    here.optional("isend and irecv", waited)
    here.optional("messages with tags", tagged)
    here.optional("messages from any rank", from_anyone)
