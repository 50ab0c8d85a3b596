"""Chooses the blocks of a plan that are compared: one of each kind."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from acclimate.llm.split.plan import Plan
from acclimate.llm.split.tracing.trace import Trace


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
