"""Writes into a draft how each kind of module is split: regions, experts, embeddings, linear modules.

An embedding is split by tokens if each rank can look up its own, and ranks sum them; this is checked first.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Container
from dataclasses import replace

import torch
from torch import Tensor, nn

from acclimate.llm.split.layers.changes import change_module, formula_of
from acclimate.llm.split.layers.randomness import RankRandomness
from acclimate.llm.split.plan import Change, Ranges, ranges
from acclimate.llm.split.planning.draft import Draft
from acclimate.llm.split.planning.experts import ExpertLayout
from acclimate.llm.split.planning.mapping import Style
from acclimate.llm.split.planning.regions import Layout, Region
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


ROWS, CUT = 13, 8
TOKENS = tuple(torch.Size(shape) for shape in ((2, 13), (1, 1), (3, 5)))


class _Alone:
    """A rank whose collectives return only its own part."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor[None]


def splits_by_tokens(module: nn.Module) -> bool:
    """Whether a split embedding gives the same results; tries a few tokens if it has its own forward.

    Such a forward may depend on other tokens, or compute an index from a token.
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.scale_grad_by_freq:
        return False
    if type(module).forward is nn.Embedding.forward:
        return True
    random = torch.Generator().manual_seed(0)
    weight = torch.rand(ROWS, module.weight.shape[-1], generator=random)
    whole = _with_rows(module, weight, random)
    parts = []
    for rank, (start, stop) in enumerate(((0, CUT), (CUT, ROWS))):
        part = _with_rows(module, weight[start:stop], random)
        part._parameters |= {n: p for n, p in whole._parameters.items() if n != "weight"}
        part._buffers = whole._buffers
        change = Change("vocabulary", width=ROWS, parts=(((0, CUT),), ((CUT, ROWS),)))
        change_module(part, change, _Alone(rank), RankRandomness(part, rank))
        parts.append(part)
    for shape in TOKENS:
        for offset in (0, ROWS - 1):
            tokens = (torch.arange(shape.numel()) * 5 + offset).view(shape) % (ROWS + offset)
            expected = _result(whole, tokens)
            if expected is None and offset == 0:
                return False
            found = [_result(part, tokens) for part in parts]
            if expected is None and all(parent is None for parent in found):
                continue
            if expected is None or found[0] is None or found[1] is None:
                return False
            if expected.shape != found[0].shape or not torch.allclose(expected, found[0] + found[1]):
                return False
    return True


def _with_rows(module: nn.Embedding, weight: Tensor, random: torch.Generator) -> nn.Embedding:
    """Returns a copy of an embedding with a few rows and no hooks; random values if it has none."""
    made = copy.copy(module)
    made._forward_hooks = type(made._forward_hooks)()
    made._forward_pre_hooks = type(made._forward_pre_hooks)()
    made._parameters = {
        name: p if p is None or not p.is_meta else nn.Parameter(torch.rand(p.shape, generator=random))
        for name, p in module._parameters.items()
        if name != "weight"
    }
    made._parameters["weight"] = nn.Parameter(weight)
    made._buffers = {
        name: b
        if b is None or not b.is_meta
        else (
            torch.rand(b.shape, generator=random)
            if b.is_floating_point()
            else torch.zeros_like(b, device="cpu")
        )
        for name, b in module._buffers.items()
    }
    for name, value in vars(module).items():
        if type(value) is int and value == module.weight.shape[0]:
            made.__dict__[name] = len(weight)
    made.padding_idx = None
    return made


def _result(module: nn.Module, tokens: Tensor) -> Tensor | None:
    # A forward may raise anything, for example for tokens beyond the vocabulary.
    with contextlib.suppress(Exception), torch.no_grad():
        found = module(tokens)
        return found if isinstance(found, Tensor) else None
    return None
