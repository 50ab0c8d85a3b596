"""Applies a plan to a model, and gathers a split model's weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from acclimate.errors import PlanError
from acclimate.llm.split.collectives import Group, Ranks, ranks_of
from acclimate.llm.split.layers.changes import change_module, place_shard
from acclimate.llm.split.layers.intact import IntactSplit
from acclimate.llm.split.layers.randomness import RankRandomness
from acclimate.llm.split.plan import Plan, Split, shard
from acclimate.llm.split.training import sum_gradients


def apply_plan(model: nn.Module, plan: Plan, group: Group) -> nn.Module:
    """Splits a model in place and returns it; the model may be on the meta device or loaded.

    Afterwards each parameter has its shard's shape, and the model's forward runs the collectives. It raises
    :class:`PlanError` if a split module has been replaced since.

    Raises:
        PlanError: the plan is for another number of ranks or another model.
    """
    ranks = ranks_of(group)
    if ranks.size != plan.size:
        raise PlanError(f"The plan is for {plan.size} ranks, but the group has {ranks.size}.")
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in tensors.items():
        if name not in plan.splits or tuple(tensor.shape) != plan.splits[name].shape:
            planned = plan.splits[name].shape if name in plan.splits else "no such parameter"
            raise PlanError(f"{name} has the shape {tuple(tensor.shape)}; the plan has {planned}.")
    if plan.size == 1:
        return model
    made: dict[int, nn.Parameter] = {}
    for name, tensor in tensors.items():
        owner, _, last = name.rpartition(".")
        place_shard(modules[owner], last, plan.splits[name], ranks.rank, tensor, made)
    randomness = RankRandomness(model, ranks.rank)
    changed: set[int] = set()
    for name, change in plan.modules.items():
        # A module may have two names, as the embedding of a model with soft prompts.
        if id(modules[name]) not in changed:
            change_module(modules[name], change, ranks, randomness)
            changed.add(id(modules[name]))
    sum_gradients(model, plan, ranks)
    IntactSplit(model, plan.modules, plan.size)
    return model


def part_of_rank(
    plan: Plan, tensors: Mapping[str, Tensor], own: Collection[str], rank: int
) -> dict[str, Tensor]:
    """Returns a rank's part of a whole model's tensors; tensors that are not whole stay as they are.

    A split tensor that is not in ``own`` is another rank's, and left out.
    """
    found = {}
    for name, tensor in tensors.items():
        split = plan.splits.get(name)
        if split is None or split.kind == "replicated" or tuple(tensor.shape) != split.shape:
            found[name] = tensor
        elif name in own:  # another rank may hold all of it
            found[name] = shard(tensor, split, rank).clone(memory_format=torch.contiguous_format)
    return found


def gather(plan: Plan, model: nn.Module, group: Group) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor of the whole model with its name, on every rank; tied tensors once."""
    return gather_tensors(plan, model.state_dict(keep_vars=True), group)


def gather_tensors(plan: Plan, own: Mapping[str, Tensor], group: Group) -> Iterator[tuple[str, Tensor]]:
    """Gathers shards and yields each whole tensor with its name; tied tensors once.

    ``own`` has this rank's shard of each parameter: of weights, or of an optimizer's state.
    """
    ranks = ranks_of(group)
    example = next(iter(own.values()))
    for name, split in plan.splits.items():
        if name in plan.shared:
            continue
        if split.kind != "replicated":
            yield name, put_together(own.get(name), split, ranks, example)
        elif name in own:
            yield name, own[name].detach()


def put_together(part: Tensor | None, split: Split, ranks: Ranks, example: Tensor) -> Tensor:
    """Returns the whole tensor from the ranks' parts; where ranks hold copies, the first rank's counts."""
    taken: set[int] = set()
    dtype = example.dtype if part is None else part.dtype
    device = example.device if part is None else part.device
    whole = torch.zeros(split.shape, dtype=dtype, device=device)
    for rank, parts in enumerate(split.parts):
        places = [place for start, stop in parts for place in range(start, stop)]
        fresh = sorted({place: at for at, place in enumerate(places) if place not in taken}.values())
        taken.update(places)
        if rank == ranks.rank and part is not None and fresh:
            chosen = part.detach().index_select(split.dim, torch.tensor(fresh, device=device))
            whole.index_copy_(split.dim, torch.tensor([places[at] for at in fresh], device=device), chosen)
    # Summed as integers, because a floating-point sum would turn -0.0 into 0.0.
    ranks.all_reduce(whole.view(torch.int32 if whole.element_size() % 4 == 0 else torch.uint8))
    return whole
