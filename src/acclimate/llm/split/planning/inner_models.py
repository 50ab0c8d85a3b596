"""Inner models that the traced run does not call, such as an audio encoder; they are planned separately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from torch import nn

from acclimate.llm.split.plan import Plan
from acclimate.llm.split.tracing.trace import Trace

T = TypeVar("T")


def unreached_models(model: nn.Module, trace: Trace) -> dict[str, nn.Module]:
    """Returns the outermost models within a model that its run did not call, by their names.

    An inner model that shares a parameter with the rest is left out, because both need the same split.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_model = hasattr(module, "main_input_name") and hasattr(module, "config")
        if not name or not is_model or name in trace.blocks or inside(name, found):
            continue
        own = {id(p) for p in module.parameters()}
        others = {id(p) for n, p in model.named_parameters(remove_duplicate=False) if not inside(n, {name})}
        is_reached = any(inside(block, {name}) for block in (*trace.blocks, *trace.calls))
        if not is_reached and not own & others and any(inside(linear, {name}) for linear in trace.linears):
            found[name] = module
    return found


def inside(name: str, models: Mapping[str, object] | set[str]) -> bool:
    """Whether a name is that of one of the models or of a module inside one."""
    return any(name == model or name.startswith(f"{model}.") for model in models)


def entries_of(values: Mapping[str, T], model: str) -> dict[str, T]:
    """Returns what is known about the modules of one inner model, by their names in it."""
    return {name[len(model) + 1 :]: value for name, value in values.items() if name.startswith(f"{model}.")}


def joined(plan: Plan, inner: Mapping[str, Plan]) -> Plan:
    """Returns the plan of a model with those of the models in it."""
    splits, source, modules = dict(plan.splits), dict(plan.source), dict(plan.modules)
    partial, whole = set(plan.partial), dict(plan.whole)
    for model, part in inner.items():
        splits |= {f"{model}.{n}": replace(s, name=f"{model}.{s.name}") for n, s in part.splits.items()}
        source |= {f"{model}.{n}": weight for n, weight in part.source.items()}
        for name, change in part.modules.items():
            region = f"{model}.{change.region}" if change.region else ""
            modules[f"{model}.{name}"] = replace(change, region=region)
        partial |= {f"{model}.{n}" for n in part.partial}
        whole = {n: reason for n, reason in whole.items() if not inside(n, {model})}
        whole |= {f"{model}.{n}": reason for n, reason in part.whole.items()}
    return replace(
        plan, splits=splits, source=source, modules=modules, partial=frozenset(partial), whole=whole
    )
