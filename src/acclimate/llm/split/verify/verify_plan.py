"""Runs a block of each kind in a plan whole and split, on random numbers, and compares the results.

The ranks are threads of this process, so the check needs no other process and no weights.
"""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from acclimate.errors import BlockError
from acclimate.llm.split.apply import apply_plan
from acclimate.llm.split.collectives import on_threads
from acclimate.llm.split.plan import Plan
from acclimate.llm.split.tracing.trace import Trace
from acclimate.llm.split.verify.recorded_calls import (
    Steps,
    calls_of_other_shapes,
    first_call,
    generation_steps,
)

TOLERANCE = 1e-4


def verify_plan(trace: Trace, plan: Plan) -> None:
    """Compares each kind of repeated block of a traced model, whole and split.

    Raises:
        BlockError: a block gives another result when it is split.
    """
    kinds = kinds_of_blocks(trace, plan)
    names = [name for name, _ in kinds]
    calls = {"": {name: first_call(trace, name) for name in names}}
    calls |= calls_of_other_shapes(trace, names)
    calls[" while it generates"] = generation_steps(trace, names)
    for name, inner in kinds:
        block = trace.modules[name]
        whole = _with_random_weights(trace, block)
        for when, steps in ((when, call[name]) for when, call in calls.items() if name in call):
            error = difference(whole, name, inner, steps, when)
            if not error <= TOLERANCE and not _is_same_in_double(whole, name, inner, steps):
                raise BlockError(
                    name,
                    f"{name} ({type(block).__name__}) gives other results on {plan.size} ranks than whole"
                    f"{when}: the largest relative difference is {error:.1e}. {_advice(name)}",
                )


def _is_same_in_double(whole: nn.Module, name: str, plan: Plan, steps: Steps) -> bool:
    """Whether a difference came from rounding, as when a router's choice depends on the last bit.

    Rounding differences disappear in float64; those of a wrong split do not.
    """
    # Some operators do not support float64.
    with contextlib.suppress(Exception):
        return difference(whole, name, plan, steps, dtype=torch.float64) <= TOLERANCE
    return False


def _advice(name: str) -> str:
    return f'Keep it whole with the mapping {{"{name}.*": "replicated"}}, or use one rank.'


def difference(
    whole: nn.Module, name: str, plan: Plan, steps: Steps, when: str = "", dtype: torch.dtype = torch.float32
) -> float:
    """Returns the largest difference of a block's results on the ranks, relative to their largest value."""
    if dtype != torch.float32:
        whole = copy.deepcopy(whole).to(dtype)

    try:
        expected = _results(copy.deepcopy(whole), steps, dtype)
    except Exception as error:
        raise BlockError(
            name,
            f"{name} ({type(whole).__name__}) cannot be compared whole and split{when}, because it does not "
            f"run by itself: {type(error).__name__}: {error}. {_advice(name)}",
        ) from error
    try:
        found = on_threads(
            plan.size,
            lambda ranks: _results(apply_plan(copy.deepcopy(whole), plan, ranks), steps, dtype),
        )
    except Exception as error:
        raise BlockError(
            name,
            f"{name} ({type(whole).__name__}) does not run on {plan.size} ranks{when}: "
            f"{type(error).__name__}: {error}. {_advice(name)}",
        ) from error
    return max(_gap(outputs, expected) for outputs in found)


def _results(block: nn.Module, steps: Steps, dtype: torch.dtype) -> list[Tensor]:
    """Returns what a block computes in a model's calls."""
    found = []
    with torch.no_grad():
        for call in steps.again(dtype):
            given = pytree.tree_leaves((call.args, call.kwargs))
            shape = next(tensor.shape for tensor in given if isinstance(tensor, Tensor))
            leaves = pytree.tree_leaves(block(*call.args, **call.kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            # Not per-head results such as attention weights, because a rank has only its own heads.
            found += [tensor for tensor in tensors if tensor.shape == shape] or tensors[:1]
    return found


def _gap(outputs: list[Tensor], expected: list[Tensor]) -> float:
    """Returns the largest difference of results, relative to their largest value."""
    if [one.shape for one in outputs] != [one.shape for one in expected]:
        return math.inf
    worst = 0.0
    for one, other in zip(outputs, expected, strict=True):
        # Where the whole block returns NaN, as if a mask leaves nothing to attend to, ranks must too.
        known = ~(one.isnan() & other.isnan())
        if known.any():
            gap = (one - other)[known].abs().max() / other[known].abs().max().clamp(min=1.0)
            worst = max(worst, math.inf if gap.isnan() else float(gap))
    return worst


def _with_random_weights(trace: Trace, block: nn.Module) -> nn.Module:
    """Returns a float32 copy of a block with random weights, without stand-ins."""
    new = {
        id(p): nn.Parameter(torch.randn(p.shape, generator=trace.random).div_(max(1, p.shape[-1]) ** 0.5))
        for p in block.parameters()
        if p.is_meta and p.is_floating_point()
    }
    stand_ins = {id(stand_in) for stand_in in trace.stand_ins.modules}
    hooks = [
        (
            module,
            module._forward_pre_hooks,
            module.__dict__.pop("forward", None) if id(module) in stand_ins else None,
        )
        for module in block.modules()
    ]
    try:
        for module, before, _ in hooks:
            own = ((key, hook) for key, hook in before.items() if key not in trace.stand_ins.hooks)
            module._forward_pre_hooks = type(before)(own)
        return copy.deepcopy(block, dict(new)).float()
    finally:
        for module, before, forward in hooks:
            module._forward_pre_hooks = before
            if forward is not None:
                module.forward = forward


def kinds_of_blocks(trace: Trace, plan: Plan) -> list[tuple[str, Plan]]:
    """Returns one block of each kind with its part of the plan."""
    seen: set[object] = set()
    found = []
    for name in _blocks_of(trace, plan):
        inner = _part_of_plan(plan, name)
        splits = tuple((n, s.shape, s.parts) for n, s in inner.splits.items())
        kind = (type(trace.modules[name]), splits, str(inner.modules))
        if inner.modules and kind not in seen:
            seen.add(kind)
            found.append((name, inner))
    return found


def _blocks_of(trace: Trace, plan: Plan) -> list[str]:
    """Returns the layers (outermost modules in lists), and the other modules that hold changes."""
    found: list[str] = []
    for name, module in trace.modules.items():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{block}.") for block in found):
            found += [
                f"{name}.{key}" for key, _ in module.named_children() if f"{name}.{key}" in trace.blocks
            ]
    ends = {*trace.vocabulary, trace.head}
    members: dict[str, list[str]] = {}
    for name, change in plan.modules.items():
        members.setdefault(change.region or name, []).append(name)
    for name, change in plan.modules.items():
        if name in ends or any(name.startswith(f"{block}.") for block in found):
            continue
        parts = name.split(".")
        above = [".".join(parts[:count]) for count in range(1, len(parts))]
        lists = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
        holders = [
            ancestor
            for ancestor in above
            if ancestor in trace.blocks
            and not isinstance(trace.modules[ancestor], lists)
            and all(other.startswith(f"{ancestor}.") for other in members[change.region or name])
        ]
        # Embeddings are not compared: they would need valid tokens as input.
        small = [h for h in holders if not any(str(end).startswith(f"{h}.") for end in ends)]
        found += (small or holders)[:1]
    return found


def _part_of_plan(plan: Plan, block: str) -> Plan:
    """Returns the plan of one block, with names relative to it."""

    def inside(name: str) -> bool:
        return name.startswith(f"{block}.") or name == block

    at = len(block) + 1
    return Plan(
        plan.size,
        {n[at:]: s for n, s in plan.splits.items() if inside(n)},
        {n[at:]: s for n, s in plan.source.items() if inside(n)},
        {n[at:]: replace(c, region=c.region[at:]) for n, c in plan.modules.items() if inside(n)},
        {n[at:]: o[at:] for n, o in plan.shared.items() if inside(n)},
        frozenset(n[at:] for n in plan.partial if inside(n)),
    )
