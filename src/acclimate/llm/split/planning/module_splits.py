"""Writes into a draft how each kind of module is split: regions, experts, embeddings, linear modules."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from torch import nn

from acclimate.llm.split.layers.changes import formula_of
from acclimate.llm.split.plan import Change, Ranges, ranges
from acclimate.llm.split.planning.draft import Draft
from acclimate.llm.split.planning.experts import ExpertLayout
from acclimate.llm.split.planning.mapping import Style
from acclimate.llm.split.planning.regions import Layout, Region
from acclimate.llm.split.planning.vocabulary import splits_by_tokens
from acclimate.llm.split.tracing.trace import Trace


def split_region(draft: Draft, trace: Trace, region: Region, layout: Layout) -> None:
    """Splits a region: its sources by columns, and its sink and twins by rows."""
    for name in region.sources:
        _split_source(draft, trace, region, layout, name)
    rows = tuple(ranges(row) for row in layout.rows)
    for name in (region.sink, *region.twins):
        dim = trace.linears[name][1]
        draft.split(f"{name}.weight", "rows", dim, rows)
        draft.keep_on_first_rank(f"{name}.bias")
        width = draft.tensors[f"{name}.weight"].shape[dim]
        expands = tuple(layout.expands)
        draft.change(name, Change("rows", width=width, expands=expands, parts=rows, region=region.sink))
    for name in region.through:
        sees_all = any(layout.expands)
        if not sees_all:
            _split_vectors(draft, name, rows)
        width = draft.tensors[f"{name}.weight"].shape[0]
        formula = formula_of(trace.modules[name]) or ""
        draft.change(name, Change("norm", width=width, parts=rows, norm=formula, sees_all=sees_all))
    for name in region.whole:
        known = draft.changes.get(name, Change("whole"))
        draft.changes[name] = replace(known, copies_output=True)
    draft.partial |= trace.flows.uses[region.sink]
    for name, (dim, indices) in layout.parameters.items():
        draft.split(name, "columns", dim, tuple(ranges(index) for index in indices))
    for (name, attribute), values in layout.attributes.items():
        draft.change_block(name, attributes={attribute: tuple(values)})
    for key, (dim, indices) in layout.arguments.items():
        draft.change_block(region.block, arguments={key: (dim, tuple(ranges(index) for index in indices))})


def _split_source(draft: Draft, trace: Trace, region: Region, layout: Layout, name: str) -> None:
    """Splits one source of a region by columns, with the normalization over them."""
    columns = tuple(ranges(column) for column in layout.columns[name])
    dim = trace.linears[name][0]
    draft.split(f"{name}.weight", "columns", dim, columns)
    draft.split(f"{name}.bias", "columns", 0, columns)
    feeding = trace.flows.sources[name]
    # Modules that stay whole feed it, and their outputs are copied to the ranks already.
    is_inside = name not in trace.flows.from_entry and bool(feeding) and feeding <= set(region.whole)
    if is_inside:
        draft.partial |= trace.flows.uses[name]
    width = draft.tensors[f"{name}.weight"].shape[dim]
    expands = tuple(layout.expands)
    norm = next((n for n, of in region.norms.items() if of == name), None)
    change = Change(
        "columns",
        copies_input=not is_inside,
        width=width,
        expands=expands if norm is None else (),
        parts=columns,
        region=region.sink,
    )
    draft.change(name, change)
    if norm is not None:
        _split_vectors(draft, norm, columns)
        formula = formula_of(trace.modules[norm]) or ""
        draft.change(norm, Change("norm", width=width, expands=expands, parts=columns, norm=formula))


def _split_vectors(draft: Draft, name: str, parts: tuple[Ranges, ...]) -> None:
    draft.split(f"{name}.weight", "columns", 0, parts)
    draft.split(f"{name}.bias", "columns", 0, parts)


def split_experts(draft: Draft, name: str, layout: ExpertLayout) -> None:
    """Splits every expert of a module."""
    for key, (dim, indices) in layout.parameters.items():
        draft.split(f"{name}.{key}", "experts", dim, tuple(ranges(index) for index in indices))
    attributes = {key: tuple(values) for key, values in layout.attributes.items()}
    draft.change(name, Change("experts", copies_input=True, attributes=attributes))


def split_alone(draft: Draft, name: str, style: Style, dims: tuple[int, int]) -> None:
    """Splits one linear module by itself: all ranks have its input and output whole."""
    weight = draft.tensors[f"{name}.weight"]
    is_rows = style == "rows"
    dim = dims[1 if is_rows else 0]
    parts = draft.even_parts(weight.shape[dim])
    draft.split(f"{name}.weight", "rows" if is_rows else "columns", dim, parts)
    if is_rows:
        draft.keep_on_first_rank(f"{name}.bias")
    else:
        draft.split(f"{name}.bias", "columns", 0, parts)
    change = Change(
        "rows" if is_rows else "head",
        copies_input=True,
        width=weight.shape[dim],
        expands=(True,) * draft.size if is_rows else (),
        parts=parts,
    )
    draft.change(name, change)


def split_vocabulary(draft: Draft, trace: Trace, model: nn.Module, kept: Container[str]) -> dict[str, str]:
    """Splits the vocabulary's embeddings and the output head by tokens, except ``kept`` modules.

    Returns:
        Per embedding that cannot be split, the reason.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    whole = [n for n in trace.vocabulary if n not in kept and not splits_by_tokens(modules[n])]
    tied = {id(modules[name].weight) for name in whole}
    for name in trace.vocabulary:
        if name not in kept and id(modules[name].weight) not in tied:
            weight = draft.tensors[f"{name}.weight"]
            parts = draft.even_parts(weight.shape[0])
            draft.split(f"{name}.weight", "vocabulary", 0, parts)
            draft.change(name, Change("vocabulary", width=weight.shape[0], parts=parts))
    head = trace.head
    if head is not None and head not in kept and id(modules[head].weight) not in tied:
        weight, dim = draft.tensors[f"{head}.weight"], trace.linears[head][0]
        parts = draft.even_parts(weight.shape[dim])
        draft.split(f"{head}.weight", "vocabulary", dim, parts)
        draft.split(f"{head}.bias", "vocabulary", 0, parts)
        draft.change(head, Change("head", copies_input=True, width=weight.shape[dim], parts=parts))
    reason = "its code gives another result when each rank looks up only its own tokens"
    return dict.fromkeys(whole, reason)
