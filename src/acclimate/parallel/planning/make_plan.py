"""Decides how each module is split, from the user's mapping, the model's published plan or its structure."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from acclimate.errors import BlockError, PlanError
from acclimate.parallel.layers.norm_formulas import formula_of
from acclimate.parallel.plan import Change, Kind, Plan, Ranges, Source, Split, ranges, shard
from acclimate.parallel.planning.experts import ExpertLayout
from acclimate.parallel.planning.inner_models import entries_of, inside, joined, unreached_models
from acclimate.parallel.planning.layouts import Layout
from acclimate.parallel.planning.mapping import Wish, wishes_of_model, wishes_of_user
from acclimate.parallel.planning.reasons import kind_of, parents_of, reasons_of, refusal
from acclimate.parallel.planning.regions import Region
from acclimate.parallel.planning.shares import even_shares
from acclimate.parallel.planning.structure import Structure, find_structure
from acclimate.parallel.planning.vocabulary import splits_by_tokens
from acclimate.parallel.tracing.attempts import traced
from acclimate.parallel.tracing.trace import Trace
from acclimate.parallel.tracing.weight_access import may_access_weights
from acclimate.parallel.verify.verify_plan import verify_plan

MOST_WHOLE = 0.2
"""The largest share of a model that stays whole if more can be split."""

__all__ = ["Change", "Plan", "Split", "make_plan", "shard"]


def make_plan(
    model: nn.Module,
    size: int,
    user: Mapping[str, Any] | None = None,
    *,
    example: Callable[[nn.Module], Any] | None = None,
    verify: bool | Literal["auto"] = "auto",
) -> Plan:
    """Returns how a model is split over ``size`` ranks; the model may be on the meta device.

    Args:
        model: the whole model.
        size: the number of ranks.
        user: a mapping from patterns of module names to splits; see ``docs/autotp.md``.
        example: a function that calls the model once; needed if ``input_ids`` are not enough.
        verify: whether to run each kind of layer whole and split, and compare the results. ``"auto"`` does so
            if a split was derived only from the structure.

    Raises:
        PlanError: a module cannot be split as asked, or its split gives other results than the whole module.
    """
    if size < 1:
        raise PlanError(f"A model cannot be split over {size} ranks; at least 1 is needed.")
    with _own_settings():
        return _made_plan(model, size, user, example, verify)


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    """Resets torch's gradient mode, default device and default dtype during planning.

    Planning traces the data flow through gradients, but callers often load a model under ``no_grad`` or with
    another default device or dtype.
    """
    dtype = torch.get_default_dtype()
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def _made_plan(
    model: nn.Module,
    size: int,
    user: Mapping[str, Any] | None,
    example: Callable[[nn.Module], Any] | None,
    verify: bool | Literal["auto"],
) -> Plan:
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    wished = wishes_of_user(user, names)
    try:
        return _plan(model, size, wished, wishes_of_model(model, names), example, verify)
    except PlanError:
        raise
    except Exception as error:  # a model's code may raise anything
        raise PlanError(
            f"{type(model).__name__} cannot be split over {size} ranks, because no copy of it can be traced: "
            f"{type(error).__name__}: {error}. Use one rank."
        ) from error


def _plan(
    model: nn.Module,
    size: int,
    wished: Mapping[str, Wish],
    published: Mapping[str, Wish],
    example: Callable[[nn.Module], Any] | None,
    verify: bool | Literal["auto"],
    is_inner: bool = False,
) -> Plan:
    """Plans a model, and separately the inner models that its traced run does not call."""
    trace = traced(model, example)
    inner: dict[str, Plan] = {}
    if size > 1:
        for name, part in unreached_models(model, trace).items():
            asked, said = entries_of(wished, name), entries_of(published, name)
            # An inner model that cannot run or be split by itself stays whole.
            with contextlib.suppress(Exception):
                inner[name] = _plan(part, size, asked, said, None, verify, is_inner=True)
    wished = {name: wish for name, wish in wished.items() if not inside(name, inner)}
    return joined(_proven_plan(model, trace, size, wished, published, verify, inner, is_inner), inner)


def _proven_plan(
    model: nn.Module,
    trace: Trace,
    size: int,
    wished: Mapping[str, Wish],
    published: Mapping[str, Wish],
    verify: bool | Literal["auto"],
    inner: Mapping[str, Plan],
    is_inner: bool,
) -> Plan:
    """Makes a plan; if a split block gives wrong results, splits its linear modules one by one instead."""
    alone: set[str] = set()
    refusal: PlanError | None = None
    while True:
        try:
            plan = _Planner(model, size, wished, published, alone, inner, is_inner).plan(trace)
            if verify is True or (verify == "auto" and set(plan.source.values()) - {"published"}):
                verify_plan(trace, plan)
            return plan
        except BlockError as error:
            refusal = refusal or error
            kind = kind_of(error.block)
            inside = {n for n in trace.linears if any(kind_of(each) == kind for each in parents_of(n))}
            more = inside - alone - set(wished)
            if not more:
                raise refusal from None
            alone |= more
        except PlanError as error:
            raise refusal or error from None


class _Planner:
    def __init__(
        self,
        model: nn.Module,
        size: int,
        wished: Mapping[str, Wish],
        published: Mapping[str, Wish],
        alone: Container[str],
        inner: Mapping[str, Plan],
        is_inner: bool,
    ) -> None:
        self.wished, self.published, self.alone = wished, published, alone
        self.inner, self.is_inner = inner, is_inner
        self.split_apart = {
            f"{model}.{n}"
            for model, plan in inner.items()
            for n, s in plan.splits.items()
            if s.kind != "replicated"
        }
        self.model = model
        self.size = size
        self.splits: dict[str, Split] = {}
        self.changes: dict[str, Change] = {}
        self.source: dict[str, Source] = {}
        self.partial: set[str] = set()
        self.whole: dict[str, str] = {}
        self.tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        persistent = set(model.state_dict(keep_vars=True))
        self.tensors |= {n: b for n, b in model.named_buffers(remove_duplicate=False) if n in persistent}

    def plan(self, trace: Trace) -> Plan:
        kept = {name for name, wish in self.wished.items() if wish == "replicated"}
        kept |= {name for name in trace.linears if name in self.alone}
        structure = Structure() if self.size == 1 else find_structure(trace, self.size, kept)
        forced = {} if self.size == 1 else self._forced(trace, structure)
        if forced:
            structure = find_structure(trace, self.size, kept | set(forced))
        for name, wish in forced.items():
            self._force(name, wish, trace.linears[name])
            structure.whole.pop(name, None)
        for region, layout in structure.regions:
            self._split_region(trace, region, layout)
        for name, experts in structure.experts.items():
            self._split_experts(name, experts)
        if self.size > 1:
            self._split_vocabulary(trace, kept | set(forced))
            kept -= {name for name in kept if name in self.alone}
            self._split_alone(trace, kept | set(forced))
            for name in [name for name in structure.whole if f"{name}.weight" in self.splits]:
                del structure.whole[name]
        shared = self._share(trace)
        if self.size > 1:
            self._check(trace, structure, kept, forced)
        for name, tensor in self.tensors.items():
            if name not in self.splits:
                parts = (((0, tensor.shape[0]) if tensor.dim() else (0, 1),),) * self.size
                self.splits[name] = Split(name, tuple(tensor.shape), "replicated", 0, parts)
        self.partial -= {name for name in self.partial if self.splits[name].kind != "replicated"}
        return Plan(
            self.size,
            self.splits,
            self._sources(),
            self.changes,
            shared,
            frozenset(self.partial),
            structure.whole | self.whole,
        )

    def _sources(self) -> dict[str, Source]:
        """Returns who decided each split; every split is verified, whoever decided it."""
        found: dict[str, Source] = {}
        for name in self.source:
            role = self._role(name)
            if name in self.wished:
                found[name] = "user"
            elif name in self.published and (role != "columns" or self.published[name] == "columns"):
                found[name] = "published"
            else:
                found[name] = "structure"
        return found

    def _role(self, name: str) -> str:
        role = self.changes[name].role
        return "vocabulary" if role == "head" else role

    def _check(
        self, trace: Trace, structure: Structure, kept: Container[str], forced: Container[str]
    ) -> None:
        """Raises if a split that the user asks for is wrong, or if most of the model would stay whole."""
        for name, wish in self.wished.items():
            is_linear = name in trace.linears or name in trace.experts or name in trace.vocabulary
            if wish == "replicated" or not is_linear or name in forced:
                continue
            role = self._role(name) if name in self.source else None
            if role == wish or (name == trace.head and wish == "columns"):
                continue
            reason = f": {structure.whole[name]}" if name in structure.whole else ""
            raise PlanError(
                f"{name} cannot be split by {wish}, as the mapping asks{reason}. "
                'Leave it out of the mapping, or map it to "replicated".'
            )
        whole, split = self._amounts(trace, kept)
        if whole > split and not self.is_inner:
            split_names = self.splits.keys() | self.split_apart
            left = {name: each for name, each in self.tensors.items() if name not in split_names}
            reasons = reasons_of(trace, left, structure.whole, kept)
            share = whole / (split + whole)
            raise PlanError(refusal(type(self.model).__name__, self.size, share, reasons))

    def _amounts(self, trace: Trace, kept: Container[str]) -> tuple[int, int]:
        """Returns how many parameter elements besides embeddings stay whole, and how many are split."""
        ends = {*trace.vocabulary, trace.head}
        tables = {name for name, module in trace.modules.items() if isinstance(module, nn.Embedding)}
        split = whole = 0
        for name, tensor in self.tensors.items():
            owner = name.rpartition(".")[0]
            if owner not in ends and owner not in kept and owner not in tables and tensor.is_floating_point():
                is_split = name in self.splits or name in self.split_apart
                split += tensor.numel() * is_split
                whole += tensor.numel() * (not is_split)
        return whole, split

    def _is_used(self, trace: Trace, name: str) -> bool:
        owner = name.rpartition(".")[0]
        return owner in trace.linears or owner in trace.vocabulary or owner in trace.experts

    # -- what the user forces --------------------------------------------------------------------

    def _forced(self, trace: Trace, structure: Structure) -> dict[str, Wish]:
        """Returns the modules for which the user's mapping differs from the structure."""
        roles: dict[str, Wish] = dict.fromkeys(trace.vocabulary, "vocabulary")
        for region, _ in structure.regions:
            roles |= dict.fromkeys(region.sources, "columns")
            roles |= dict.fromkeys((region.sink, *region.twins), "rows")
        found: dict[str, Wish] = {}
        for name, wish in self.wished.items():
            is_known = wish == "replicated" or roles.get(name) == wish or name not in trace.linears
            # The columns of the output head are the vocabulary.
            if not is_known and wish != "experts" and not (name == trace.head and wish != "rows"):
                found[name] = wish
        return found

    def _split_alone(self, trace: Trace, kept: Container[str]) -> None:
        """Splits linear modules that belong to no region, largest first, until most of the model is split.

        Each costs a collective that gathers its output, so this splits no more than needed.
        """
        dims = trace.linears | trace.called_linears
        counts = Counter(id(tensor) for tensor in self.tensors.values())
        kinds: dict[str, list[str]] = {}
        for name in dims:
            weight = self.tensors[f"{name}.weight"]
            is_called = name in trace.calls or name in trace.called_linears
            is_free = f"{name}.weight" not in self.splits and name not in kept and counts[id(weight)] == 1
            is_free = is_free and not inside(name, self.inner)
            if not is_free or name == trace.head or weight.shape[dims[name][0]] < self.size:
                continue
            # A run with only tokens does not call an image encoder, for example.
            if is_called or not any(
                may_access_weights(trace.modules[each]) for each in parents_of(name)[:-1]
            ):
                kinds.setdefault(kind_of(name), []).append(name)
        sizes = {k: sum(self.tensors[f"{n}.weight"].numel() for n in names) for k, names in kinds.items()}
        for kind in sorted(kinds, key=lambda each: -sizes[each]):
            whole, split = self._amounts(trace, kept)
            if whole <= MOST_WHOLE * (whole + split):
                return
            for name in kinds[kind]:
                self._force(name, "columns", dims[name])
                self.source[name] = "structure"

    def _force(self, name: str, wish: Wish, dims: tuple[int, int]) -> None:
        """Splits one linear module by itself: all ranks have its input and output whole."""
        weight = self.tensors[f"{name}.weight"]
        dim = dims[1 if wish == "rows" else 0]
        parts = self._even(weight.shape[dim])
        self._split(f"{name}.weight", "rows" if wish == "rows" else "columns", dim, parts)
        if wish == "rows":
            self._on_first_rank(f"{name}.bias")
        else:
            self._split(f"{name}.bias", "columns", 0, parts)
        self.changes[name] = Change(
            "rows" if wish == "rows" else "head",
            copies_input=True,
            width=weight.shape[dim],
            expands=(True,) * self.size if wish == "rows" else (),
            parts=parts,
        )
        self.source[name] = "user"

    # -- regions ---------------------------------------------------------------------------------

    def _split_region(self, trace: Trace, region: Region, layout: Layout) -> None:
        for name in region.sources:
            columns = tuple(ranges(each) for each in layout.columns[name])
            dim = trace.linears[name][0]
            self._split(f"{name}.weight", "columns", dim, columns)
            self._split(f"{name}.bias", "columns", 0, columns)
            feeding = trace.flows.sources[name]
            inside = name not in trace.flows.from_entry and bool(feeding) and feeding <= set(region.whole)
            norm = next((n for n, of in region.norms.items() if of == name), None)
            self.changes[name] = Change(
                "columns",
                copies_input=not inside,
                width=self.tensors[f"{name}.weight"].shape[dim],
                expands=tuple(layout.expands) if norm is None else (),
                parts=columns,
                region=region.sink,
            )
            if inside:
                self.partial |= trace.flows.uses[name]
            if norm is not None:
                self._split(f"{norm}.weight", "columns", 0, columns)
                self._split(f"{norm}.bias", "columns", 0, columns)
                formula = formula_of(trace.modules[norm])
                self.changes[norm] = Change(
                    "norm",
                    width=self.changes[name].width,
                    expands=tuple(layout.expands),
                    parts=columns,
                    norm=formula or "",
                )
                self.source[norm] = "structure"
            self.source[name] = "structure"
        rows = tuple(ranges(each) for each in layout.rows)
        for name in (region.sink, *region.twins):
            dim = trace.linears[name][1]
            self._split(f"{name}.weight", "rows", dim, rows)
            self._on_first_rank(f"{name}.bias")
            width = self.tensors[f"{name}.weight"].shape[dim]
            self.changes[name] = Change(
                "rows", width=width, expands=tuple(layout.expands), parts=rows, region=region.sink
            )
            self.source[name] = "structure"
        for name in region.through:
            sees_all = any(layout.expands)
            if not sees_all:
                self._split(f"{name}.weight", "columns", 0, rows)
                self._split(f"{name}.bias", "columns", 0, rows)
            width = self.tensors[f"{name}.weight"].shape[0]
            kind = formula_of(trace.modules[name]) or ""
            self.changes[name] = Change("norm", width=width, parts=rows, norm=kind, sees_all=sees_all)
            self.source[name] = "structure"
        for name in region.whole:
            known = self.changes.get(name, Change("whole"))
            self.changes[name] = replace(known, copies_output=True)
        self.partial |= trace.flows.uses[region.sink]
        for name, (dim, indices) in layout.parameters.items():
            self._split(name, "columns", dim, tuple(ranges(each) for each in indices))
        for (name, attribute), values in layout.attributes.items():
            self._change_block(name, attributes={attribute: tuple(values)})
        for key, (dim, indices) in layout.arguments.items():
            self._change_block(region.block, arguments={key: (dim, tuple(ranges(each) for each in indices))})

    def _change_block(
        self,
        name: str,
        attributes: Mapping[str, tuple[int, ...]] | None = None,
        arguments: Mapping[str | int, tuple[int, tuple[Ranges, ...]]] | None = None,
    ) -> None:
        known = self.changes.get(name, Change("block"))
        self.changes[name] = replace(
            known,
            attributes={**known.attributes, **(attributes or {})},
            arguments={**known.arguments, **(arguments or {})},
        )

    def _split_experts(self, name: str, experts: ExpertLayout) -> None:
        for key, (dim, indices) in experts.parameters.items():
            self._split(f"{name}.{key}", "experts", dim, tuple(ranges(each) for each in indices))
        self.changes[name] = Change(
            "experts", copies_input=True, attributes={k: tuple(v) for k, v in experts.attributes.items()}
        )
        self.source[name] = "structure"

    # -- vocabulary ------------------------------------------------------------------------------

    def _split_vocabulary(self, trace: Trace, kept: Container[str]) -> None:
        modules = dict(self.model.named_modules(remove_duplicate=False))
        tables = [each for each in trace.vocabulary if each not in kept]
        whole = [each for each in tables if not splits_by_tokens(modules[each])]
        tied = {id(modules[each].weight) for each in whole}
        for each in whole:
            self.whole[each] = "its code gives another result when each rank looks up only its own tokens"
        for name, role in [*((n, "vocabulary") for n in trace.vocabulary), (trace.head, "head")]:
            if name is None or name in kept or id(modules[name].weight) in tied:
                continue
            weight = self.tensors[f"{name}.weight"]
            dim = 0 if role == "vocabulary" else trace.linears[name][0]
            parts = self._even(weight.shape[dim])
            self._split(f"{name}.weight", "vocabulary", dim, parts)
            if role == "head":
                self._split(f"{name}.bias", "vocabulary", 0, parts)
            change = Change("vocabulary" if role == "vocabulary" else "head", role == "head",
                            width=weight.shape[dim], parts=parts)  # fmt: skip
            self.changes[name] = change
            self.source[name] = "structure"

    def _even(self, count: int) -> tuple[Ranges, ...]:
        shares = even_shares(count, self.size, 16 if count >= 64 * self.size else 1)
        return tuple(((share.start, share.stop),) if share else () for share in shares)

    # -- tensors ---------------------------------------------------------------------------------

    def _split(self, name: str, kind: Kind, dim: int, parts: tuple[Ranges, ...]) -> None:
        if name in self.tensors:
            self.splits[name] = Split(name, tuple(self.tensors[name].shape), kind, dim, parts)

    def _on_first_rank(self, name: str) -> None:
        """Keeps a bias on the first rank only, because the outputs are summed over ranks."""
        if name in self.tensors:
            whole: Ranges = ((0, self.tensors[name].shape[0]),)
            self._split(name, "rows", 0, (whole, *((),) * (self.size - 1)))

    def _share(self, trace: Trace) -> dict[str, str]:
        """Gives tied parameters one split; returns the first name of each other name.

        Raises:
            PlanError: one parameter would have to be split in two ways.
        """
        first: dict[int, str] = {}
        shared: dict[str, str] = {}
        for name, tensor in self.tensors.items():
            if first.setdefault(id(tensor), name) != name:
                shared[name] = first[id(tensor)]
        for name, other in shared.items():
            one, two = self.splits.get(name), self.splits.get(other)
            if one is None and two is None:
                continue
            # The module does not use the tied parameter: the trace ran without its values.
            if one is None and two is not None and not self._is_used(trace, name):
                one = self.splits[name] = replace(two, name=name)
            if two is None and one is not None and not self._is_used(trace, other):
                two = self.splits[other] = replace(one, name=other)
            if one is None or two is None or replace(one, name=other) != two:
                raise PlanError(
                    f"{name} is the same parameter as {other}, but the two would be split differently "
                    f"({(one and one.kind) or 'replicated'} and {(two and two.kind) or 'replicated'})."
                )
        return shared
