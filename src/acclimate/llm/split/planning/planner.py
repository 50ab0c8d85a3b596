"""Decides the split of each module of one traced model; inner models are planned separately.

It says why modules stay whole, and what a user can do if most of a model would stay whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Mapping, Set
from dataclasses import replace
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from acclimate.errors import PlanError
from acclimate.llm.split.plan import Plan, Source
from acclimate.llm.split.planning.draft import Draft
from acclimate.llm.split.planning.mapping import Style, Styles
from acclimate.llm.split.planning.module_splits import (
    split_alone,
    split_experts,
    split_region,
    split_vocabulary,
)
from acclimate.llm.split.planning.structure import Structure, find_structure
from acclimate.llm.split.tracing.linear_modules import may_access_weights
from acclimate.llm.split.tracing.trace import Trace

_MOST_WHOLE = 0.2
"""The largest share of a model that stays whole if more can be split."""


class Planner:
    """Makes the plan of one model.

    Args:
        model: the model.
        trace: its run.
        size: the number of ranks.
        styles: how its modules are to be split.
        alone: linear modules that do not belong to a region, because their block gave wrong results.
        inner: the plans of the inner models that the run did not call.
        is_inner: whether the model is an inner model, most of which may stay whole.
    """

    def __init__(
        self,
        model: nn.Module,
        trace: Trace,
        size: int,
        styles: Styles,
        alone: Set[str],
        inner: Mapping[str, Plan],
        is_inner: bool,
    ) -> None:
        self._model, self._trace, self._size = model, trace, size
        self._styles, self._alone = styles, alone
        self._inner, self._is_inner = inner, is_inner
        self._draft = Draft(model, size)
        self._split_apart = {
            f"{name}.{tensor}"
            for name, plan in inner.items()
            for tensor, split in plan.splits.items()
            if split.kind != "replicated"
        }
        """The tensors that the plans of inner models split."""

    def plan(self) -> Plan:
        """Returns the plan.

        Raises:
            PlanError: a module cannot be split as the user asks, or most of the model would stay whole.
        """
        if self._size == 1:
            return self._draft.finished({}, self._draft.tie(self._is_used), {})
        replicated = {name for name, style in self._styles.user.items() if style == "replicated"}
        structure = find_structure(self._trace, self._size, replicated | self._alone)
        forced = self._forced(structure)
        if forced:
            structure = find_structure(self._trace, self._size, replicated | self._alone | set(forced))
        decided = replicated | set(forced)
        whole = self._split(structure, forced, decided)
        shared = self._draft.tie(self._is_used)
        self._check_mapping(structure.whole, forced)
        self._check_share(structure.whole, replicated)
        return self._draft.finished(self._sources(), shared, structure.whole | whole)

    def _split(self, structure: Structure, forced: Mapping[str, Style], decided: Set[str]) -> dict[str, str]:
        """Splits all modules; returns per embedding that stays whole the reason."""
        draft, trace = self._draft, self._trace
        for name, style in forced.items():
            split_alone(draft, name, style, trace.linears[name])
            structure.whole.pop(name, None)
        for region, layout in structure.regions:
            split_region(draft, trace, region, layout)
        for name, experts in structure.experts.items():
            split_experts(draft, name, experts)
        whole = split_vocabulary(draft, trace, self._model, decided | self._alone)
        self._split_linears_alone(decided)
        for name in [name for name in structure.whole if f"{name}.weight" in draft.splits]:
            del structure.whole[name]
        return whole

    def _forced(self, structure: Structure) -> dict[str, Style]:
        """Returns the modules for which the user's mapping differs from the structure."""
        trace = self._trace
        roles: dict[str, Style] = dict.fromkeys(trace.vocabulary, "vocabulary")
        for region, _ in structure.regions:
            roles |= dict.fromkeys(region.sources, "columns")
            roles |= dict.fromkeys((region.sink, *region.twins), "rows")
        found: dict[str, Style] = {}
        for name, style in self._styles.user.items():
            is_known = style == "replicated" or roles.get(name) == style or name not in trace.linears
            # The columns of the output head are the vocabulary.
            if not is_known and style != "experts" and not (name == trace.head and style != "rows"):
                found[name] = style
        return found

    def _split_linears_alone(self, decided: Container[str]) -> None:
        """Splits linear modules that belong to no region, largest first, until most of the model is split.

        Each costs a collective that gathers its output, so this splits no more than needed.
        """
        trace, tensors = self._trace, self._draft.tensors
        dims = trace.linears | trace.called_linears
        counts = Counter(id(tensor) for tensor in tensors.values())
        kinds: dict[str, list[str]] = {}
        for name in dims:
            weight = tensors[f"{name}.weight"]
            is_free = f"{name}.weight" not in self._draft.splits and name not in decided
            is_free = is_free and counts[id(weight)] == 1 and not inside(name, self._inner)
            if not is_free or name == trace.head or weight.shape[dims[name][0]] < self._size:
                continue
            is_called = name in trace.calls or name in trace.called_linears
            # A run with only tokens does not call an image encoder, for example.
            parents = [trace.modules[parent] for parent in parents_of(name)[:-1]]
            if is_called or not any(may_access_weights(parent) for parent in parents):
                kinds.setdefault(kind_of(name), []).append(name)
        sizes = {kind: sum(tensors[f"{n}.weight"].numel() for n in names) for kind, names in kinds.items()}
        for kind in sorted(kinds, key=lambda name: -sizes[name]):
            whole, split = self._amounts(decided)
            if whole <= _MOST_WHOLE * (whole + split):
                return
            for name in kinds[kind]:
                split_alone(self._draft, name, "columns", dims[name])

    def _is_used(self, parameter: str) -> bool:
        """Whether a parameter belongs to a module with a stand-in."""
        owner = parameter.rpartition(".")[0]
        return owner in self._trace.linears or owner in self._trace.vocabulary or owner in self._trace.experts

    def _sources(self) -> dict[str, Source]:
        """Returns who decided each split; every split is verified, whoever decided it."""
        found: dict[str, Source] = {}
        published = self._styles.published
        for name in self._draft.split_modules:
            is_columns = self._draft.role(name) == "columns"
            if name in self._styles.user:
                found[name] = "user"
            elif name in published and (not is_columns or published[name] == "columns"):
                found[name] = "published"
            else:
                found[name] = "structure"
        return found

    # -- refusing --------------------------------------------------------------------------------

    def _check_mapping(self, reasons: Mapping[str, str], forced: Container[str]) -> None:
        """Raises if a split that the user asks for is wrong."""
        trace = self._trace
        for name, style in self._styles.user.items():
            has_weights = name in trace.linears or name in trace.experts or name in trace.vocabulary
            if style == "replicated" or not has_weights or name in forced:
                continue
            role = self._draft.role(name) if name in self._draft.split_modules else None
            if role == style or (name == trace.head and style == "columns"):
                continue
            reason = f": {reasons[name]}" if name in reasons else ""
            raise PlanError(
                f"{name} cannot be split by {style}, as the mapping asks{reason}. "
                'Leave it out of the mapping, or map it to "replicated".'
            )

    def _check_share(self, reasons: Mapping[str, str], kept: Container[str]) -> None:
        """Raises if most of the model would stay whole, although the user does not keep it whole."""
        whole, split = self._amounts(kept)
        if whole <= split or self._is_inner:
            return
        names = self._draft.splits.keys() | self._split_apart
        left = {name: tensor for name, tensor in self._draft.tensors.items() if name not in names}
        known = reasons_of(self._trace, left, reasons, kept)
        raise PlanError(refusal(type(self._model).__name__, self._size, whole / (split + whole), known))

    def _amounts(self, kept: Container[str]) -> tuple[int, int]:
        """Returns how many parameter elements besides embeddings stay whole, and how many are split."""
        trace = self._trace
        ends = {*trace.vocabulary, trace.head}
        tables = {name for name, module in trace.modules.items() if isinstance(module, nn.Embedding)}
        split = whole = 0
        for name, tensor in self._draft.tensors.items():
            owner = name.rpartition(".")[0]
            if owner not in ends and owner not in kept and owner not in tables and tensor.is_floating_point():
                is_split = name in self._draft.splits or name in self._split_apart
                split += tensor.numel() * is_split
                whole += tensor.numel() * (not is_split)
        return whole, split


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


_MOST_LISTED = 4


def kind_of(name: str) -> str:
    """Returns the pattern that matches a module's name in all layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def parents_of(name: str) -> list[str]:
    """Returns the names of a module's parents, outermost first, and its own name."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def reasons_of(
    trace: Trace,
    tensors: Mapping[str, Tensor],
    known: Mapping[str, str],
    left_out: Container[str],
) -> dict[str, str]:
    """Returns for each module with an unsplit matrix the reason, known or found here, largest matrix first.

    Modules in ``left_out`` are kept whole by the user.
    """
    found: dict[str, tuple[int, str]] = {}
    for name, tensor in tensors.items():
        owner, _, last = name.rpartition(".")
        module = trace.modules.get(owner)
        if owner in left_out or tensor.dim() < 2 or isinstance(module, nn.Embedding):
            continue
        if owner not in found or -tensor.numel() < found[owner][0]:
            found[owner] = (-tensor.numel(), known.get(owner) or _reason(trace, owner, last))
    return {name: reason for name, (_, reason) in sorted(found.items(), key=lambda entry: entry[1][0])}


def _reason(trace: Trace, owner: str, last: str) -> str:
    module = trace.modules.get(owner)
    opaque = [parent for parent in parents_of(owner) if type(trace.modules[parent]) in trace.opaque]
    if opaque:
        return f"{type(trace.modules[opaque[0]]).__name__} uses weights of linear modules directly"
    if isinstance(module, _ConvNd):
        return "convolutions are not split"
    kind = type(module).__name__
    return f"{kind} is not a linear module, and its use of {last} cannot be traced"


def refusal(kind: str, size: int, share: float, reasons: Mapping[str, str]) -> str:
    """Returns the error message for a model most of which would stay whole."""
    patterns = sorted({kind_of(name) for name in reasons})
    mapping = ", ".join(f'"{pattern}": "replicated"' for pattern in patterns)
    listed = [f"{name} ({reason})" for name, reason in reasons.items()]
    more = f"; and {len(listed) - _MOST_LISTED} more" if len(listed) > _MOST_LISTED else ""
    return (
        f"{kind} cannot be split over {size} ranks: {share:.0%} of its parameters would stay whole on every "
        f"rank. No correct split was found for {'; '.join(listed[:_MOST_LISTED])}{more}. "
        f"To keep them whole anyway, pass the mapping {{{mapping}}}."
    )
