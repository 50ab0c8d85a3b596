"""Gradients of a split model.

Where each rank has a part of the columns, it computes a part of the gradient of whatever all ranks have.
For the input of a split module, the collectives of the forward sum the parts on their way back. For a
parameter between split modules, such as the weight of a normalization per head, a hook does. Copies of a
key/value head on many ranks get the sum of the gradients of all copies, so that they stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from acclimate.parallel.collectives import Group, Ranks, ranks_of
from acclimate.parallel.split import Plan, Split, shard

_SUMMED = "_acclimate_summed"


def sum_gradients(model: nn.Module, plan: Plan, ranks: Ranks) -> None:
    """Makes the gradients of copied and of partly used parameters whole."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        sums: dict[str, Callable[[Tensor], Tensor]] = {}
        for own, parameter in module._parameters.items():
            name = f"{prefix}.{own}" if prefix else own
            if parameter is None or not parameter.requires_grad:
                continue
            split = plan.splits[name]
            if split.kind == "replicated" and name in plan.partial:
                sums[own] = _sum_of_parts(ranks)
            elif split.kind != "replicated" and has_copies(split):
                sums[own] = _sum_of_copies(split, ranks)
        if sums:
            _hook(module, (), sums)
            # Loading weights and FSDP2, before each forward, put other parameters in their place.
            module.register_forward_pre_hook(partial(_hook, sums=sums))


def _hook(module: nn.Module, _: object, sums: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
    for name, combine in sums.items():
        parameter = module._parameters.get(name)  # a packed module has none
        if parameter is None or not parameter.requires_grad:
            continue
        # Its own number, as who loads weights copies a parameter's attributes to another one.
        if getattr(parameter, _SUMMED, None) != id(parameter):
            parameter.register_hook(combine)
            setattr(parameter, _SUMMED, id(parameter))


def _sum_of_parts(ranks: Ranks) -> Callable[[Tensor], Tensor]:
    return lambda gradient: ranks.all_reduce(gradient.clone(memory_format=torch.contiguous_format))


def has_copies(split: Split) -> bool:
    """Tells whether ranks hold parts that overlap."""
    held = sum(stop - start for parts in split.parts for start, stop in parts)
    return split.kind != "replicated" and held > split.shape[split.dim]


def _sum_of_copies(split: Split, ranks: Ranks) -> Callable[[Tensor], Tensor]:
    def combine(gradient: Tensor) -> Tensor:
        whole = gradient.new_zeros(split.shape)
        at = 0
        for start, stop in split.parts[ranks.rank]:
            piece = gradient.narrow(split.dim, at, stop - start)
            whole.narrow(split.dim, start, stop - start).add_(piece)
            at += stop - start
        return shard(ranks.all_reduce(whole), split, ranks.rank).contiguous()

    return combine


def owned(split: Split, rank: int) -> list[bool]:
    """Tells for each place along a shard's split dimension whether no other place has the same, before it."""
    before = [each for parts in split.parts[:rank] for each in parts]
    taken = {place for start, stop in before for place in range(start, stop)}
    found = []
    for start, stop in split.parts[rank]:
        for place in range(start, stop):
            found.append(place not in taken)
            taken.add(place)
    return found


@torch.no_grad()
def clip_grad_norm(model: nn.Module, plan: Plan, group: Group, largest: float) -> Tensor:
    """Scales a split model's gradients down to a largest norm; returns the whole model's norm.

    ``torch.nn.utils.clip_grad_norm_`` would see a rank's shards only, and scale by another factor on each.
    """
    ranks = ranks_of(group)
    named = [(_plain(name), p.grad) for name, p in model.named_parameters() if p.grad is not None]
    total = torch.zeros((), device=named[0][1].device if named else None)
    for name, gradient in named:
        split = plan.splits[name]
        # A DTensor, as FSDP2 makes them; torch's module for them takes half a second to import.
        own = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        if split.kind == "replicated":
            # Each rank has it whole: the sum over ranks counts it once.
            total += own.float().square().sum() / ranks.size
        else:
            if has_copies(split):
                counted = torch.tensor(owned(split, ranks.rank), device=own.device).nonzero().flatten()
                own = own.index_select(split.dim, counted)
            total += own.float().square().sum()
    norm = ranks.all_reduce(total.reshape(1)).sqrt().reshape(())
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    for _, gradient in named:
        gradient.mul_(factor)
    return norm


def _plain(name: str) -> str:
    """The name in the model itself, which DistributedDataParallel wraps."""
    return name.removeprefix("module.")
