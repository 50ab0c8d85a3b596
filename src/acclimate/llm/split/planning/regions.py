"""Regions, and their columns that must stay on one rank.

A region is a linear module (the sink) whose input depends only on the outputs of other linear modules (the
sources) and on tensors that every rank has whole. A unit is a set of the sink's input columns with the source
columns that they depend on: a query head with its key and value head, or one column of an MLP's hidden layer.
Units are found by changing one column and recording which others change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Run = Callable[[Mapping[str, Tensor]], Tensor]
"""Runs the block between sources and sink: outputs of the sources -> input of the sink."""

_MOST_UNITS = 512
_SAMPLES = 8
_MOST_SHARED = 0.65


@dataclass(frozen=True)
class Unit:
    """Columns of the sink's input that depend on each other, and the source columns they depend on."""

    sink: tuple[int, ...]
    sources: Mapping[str, tuple[int, ...]]


def find_units(run: Run, outputs: Mapping[str, Tensor], random: torch.Generator) -> list[Unit]:
    """Returns the units of a region in the order of the sink's columns; one unit cannot be split."""
    leaves = {name: output.detach().clone().requires_grad_() for name, output in outputs.items()}
    result = run(leaves)
    if not result.requires_grad:
        return []
    units = _single_columns(result, leaves, random)
    return units if units is not None else _heads(run, result, leaves, random)


def _single_columns(
    result: Tensor, leaves: Mapping[str, Tensor], random: torch.Generator
) -> list[Unit] | None:
    """Returns the units of a region in which every source column feeds one sink column, else ``None``.

    In such a region the gradient for cotangent ``c``, divided by that for ``1``, is the sink column's ``c``.
    """
    width = result.shape[-1]
    tokens = torch.rand(result.shape[:-1], generator=random, dtype=torch.float64).to(result) + 0.5
    codes = torch.arange(1, width + 1, dtype=result.dtype)
    names, inputs = list(leaves), list(leaves.values())
    plain = torch.autograd.grad(
        result, inputs, tokens[..., None].expand_as(result).contiguous(), retain_graph=True, allow_unused=True
    )
    coded = torch.autograd.grad(
        result, inputs, tokens[..., None] * codes, retain_graph=True, allow_unused=True
    )
    found: list[dict[str, list[int]]] = [{} for _ in range(width)]
    for name, once, times in zip(names, plain, coded, strict=True):
        if once is None or times is None:
            return None
        one, code = once.reshape(-1, once.shape[-1]), times.reshape(-1, times.shape[-1])
        known = one.abs() > 1e-9 * one.abs().max()
        ratio = torch.where(known, code / torch.where(known, one, 1.0), 0.0)
        column = ratio.max(dim=0).values.round()
        wrong = known & ((ratio - column).abs() > 1e-3)
        if wrong.any() or not known.any(dim=0).all() or column.min() < 1 or column.max() > width:
            return None
        for place, target in enumerate(column.long().tolist()):
            found[target - 1].setdefault(name, []).append(place)
    if any(set(sets) != set(names) for sets in found):
        return None
    return [
        Unit((j,), {n: tuple(p) for n, p in columns_by_name.items()})
        for j, columns_by_name in enumerate(found)
    ]


def _heads(run: Run, result: Tensor, leaves: Mapping[str, Tensor], random: torch.Generator) -> list[Unit]:
    """Returns the units of any region, from gradients of sink columns and changes of source columns."""
    names, inputs = list(leaves), list(leaves.values())
    width = result.shape[-1]
    before = result.detach()
    changes: dict[tuple[str, int], frozenset[int]] = {}

    def changed_by(name: str, place: int) -> frozenset[int]:
        if (name, place) not in changes:
            with torch.no_grad():
                other = leaves[name].detach().clone()
                # The change differs per token, because softmax ignores a constant added to every key.
                noise = torch.randn(other.shape[:-1], generator=random, dtype=torch.float64)
                other[..., place] += noise.to(other)
                difference = (run({**leaves, name: other}) - before).abs().reshape(-1, width).amax(dim=0)
            changed = (difference > 1e-6 * before.abs().max()).nonzero().flatten().tolist()
            changes[name, place] = frozenset(changed)
        return changes[name, place]

    def depends_on(columns: list[int]) -> dict[str, tuple[int, ...]]:
        weights = torch.rand(len(columns), generator=random, dtype=torch.float64).to(result) + 0.5
        total = (result[..., columns] * weights).sum()
        gradients = torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True)
        found = {}
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                flat = gradient.reshape(-1, gradient.shape[-1]).abs().amax(dim=0)
                found[name] = tuple((flat > 1e-12 * flat.max()).nonzero().flatten().tolist())
        return {name: places for name, places in found.items() if places}

    left = set(range(width))
    units: list[Unit] = []
    while left:
        if len(units) == _MOST_UNITS:
            return []
        first = min(left)
        seen = [
            changed_by(name, places[at * (len(places) - 1) // (_SAMPLES - 1)])
            for name, places in depends_on([first]).items()
            for at in range(_SAMPLES if len(places) > 1 else 1)
        ]
        members = _smallest_unit([value for value in seen if first in value])
        if members is None or not members <= left:
            return []
        left -= members
        columns = sorted(members)
        units.append(Unit(tuple(columns), depends_on(columns)))
    return units


def _smallest_unit(seen: list[frozenset[int]]) -> frozenset[int] | None:
    """Returns the smallest set of sink columns outside which most of its source columns change nothing.

    Key and value columns, which query heads share, may also change other columns: each rank has a copy of
    them. A value column by itself is not a unit, because several ranks would need its query head.
    """
    for members in sorted(set(seen), key=len):
        if sum(not value <= members for value in seen) <= _MOST_SHARED * len(seen):
            return members
    return None


Indices = tuple[int, ...]


@dataclass
class Region:
    """A sink, the sources whose outputs only it depends on, and the other modules that reach it."""

    block: str
    sink: str
    sources: list[str]
    whole: list[str]
    """Linear modules that stay whole and also reach the sink."""
    norms: dict[str, str] = field(default_factory=dict)
    """Normalizations over all columns, each with its source."""
    through: list[str] = field(default_factory=list)
    """Normalizations over all columns between the sources and the sink, whose statistics ranks sum."""
    twins: list[str] = field(default_factory=list)
    """Linear modules that get the same input as the sink."""
    units: list[Unit] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)

    def leaf(self, source: str) -> str:
        """Returns the module whose output stands for a source's: its normalization, or the source itself."""
        return next((norm for norm, of in self.norms.items() if of == source), source)


@dataclass
class Layout:
    """How a region is distributed over the ranks."""

    columns: dict[str, list[Indices]]
    """Per source, each rank's columns."""
    rows: list[Indices]
    """Each rank's columns of the sink's input."""
    expands: list[bool]
    """Which ranks run the block padded."""
    attributes: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    parameters: dict[str, tuple[int, list[Indices]]] = field(default_factory=dict)
    arguments: dict[str | int, tuple[int, list[Indices]]] = field(default_factory=dict)
