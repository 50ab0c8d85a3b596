"""Gradients of a split model.

A rank with a part of the columns computes a part of the gradient of each tensor that all ranks have. For the
input of a split module, the backward of the collectives sums the parts. For a parameter between split
modules, such as the weight of a per-head normalization, a hook sums them. Copies of a key/value head on
several ranks get the sum of all copies' gradients, so that they stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from acclimate.llm.split.collectives import Group, Ranks, ranks_of
from acclimate.llm.split.plan import Plan, Split, shard

_SUMMED = "_acclimate_summed"


def sum_gradients(model: nn.Module, plan: Plan, ranks: Ranks) -> None:
    """Adds hooks that sum over ranks the gradients of copied and of partly used parameters."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        sums: dict[str, Callable[[Tensor], Tensor]] = {}
        for own, parameter in module._parameters.items():
            name = f"{prefix}.{own}" if prefix else own
            if parameter is None:
                continue
            split = plan.splits[name]
            if split.kind == "replicated" and name in plan.partial:
                sums[own] = _sum_of_parts(ranks)
            elif split.kind != "replicated" and _has_copies(split):
                sums[own] = _sum_of_copies(split, ranks)
        if sums:
            _hook(module, (), sums)
            # Loading weights replaces parameters, and so does FSDP2 before each forward.
            module.register_forward_pre_hook(partial(_hook, sums=sums))


def _hook(module: nn.Module, _: object, sums: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
    for name, combine in sums.items():
        parameter = module._parameters.get(name)  # a packed module has none
        if parameter is None or not parameter.requires_grad:
            continue
        # Compared by id, because code that loads weights copies a parameter's attributes to another one.
        if getattr(parameter, _SUMMED, None) != id(parameter):
            parameter.register_hook(combine)
            setattr(parameter, _SUMMED, id(parameter))


def _sum_of_parts(ranks: Ranks) -> Callable[[Tensor], Tensor]:
    return lambda gradient: ranks.all_reduce(gradient.clone(memory_format=torch.contiguous_format))


def _has_copies(split: Split) -> bool:
    """Whether the parts of two ranks overlap."""
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


def _owned(split: Split, rank: int) -> list[bool]:
    """Returns, for each index along a shard's split dimension, whether it is the first copy of its column."""
    before = [part for parts in split.parts[:rank] for part in parts]
    taken = {place for start, stop in before for place in range(start, stop)}
    found = []
    for start, stop in split.parts[rank]:
        for place in range(start, stop):
            found.append(place not in taken)
            taken.add(place)
    return found


@torch.no_grad()
def clip_grad_norm(model: nn.Module, plan: Plan, group: Group, largest: float) -> Tensor:
    """Scales a split model's gradients down to a maximum norm; returns the norm of the whole model.

    ``torch.nn.utils.clip_grad_norm_`` would see only a rank's shards, and scale each rank by another factor.
    """
    ranks = ranks_of(group)
    named = [(_plain(name), p.grad) for name, p in model.named_parameters() if p.grad is not None]
    total = torch.zeros((), device=named[0][1].device if named else None)
    for name, gradient in named:
        split = plan.splits[name]
        # Detects FSDP2's DTensor by attribute, because importing torch's DTensor module takes 0.5 s.
        own = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        if split.kind == "replicated":
            # Every rank has the whole gradient, so one rank adds it to the sum.
            total += own.float().square().sum() / ranks.size
        else:
            if _has_copies(split):
                counted = torch.tensor(_owned(split, ranks.rank), device=own.device).nonzero().flatten()
                own = own.index_select(split.dim, counted)
            total += own.float().square().sum()
    norm = ranks.all_reduce(total.reshape(1)).sqrt().reshape(())
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    for _, gradient in named:
        gradient.mul_(factor)
    return norm


def _plain(name: str) -> str:
    """Returns a parameter's name without the prefix that DistributedDataParallel adds."""
    return name.removeprefix("module.")
