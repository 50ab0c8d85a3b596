"""What a block may need on a rank: another order of its columns, or changed attributes and arguments.

An attribute is ``num_heads``, for example.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acclimate.llm.split.plan import ranges
from acclimate.llm.split.planning.regions import Indices, Layout, Region, Unit
from acclimate.llm.split.tracing.trace import Trace


@dataclass(frozen=True)
class _Number:
    """A number of the whole region, and its value on each rank."""

    name: str
    whole: int
    values: tuple[int, ...]
    indices: tuple[Indices, ...] = ()


@dataclass(frozen=True)
class Choice:
    """One attribute, parameter or argument that a rank may have to change, and its new value."""

    kind: str
    place: tuple[str, str] | str | int
    dim: int
    number: _Number


def _numbers(
    units: list[Unit], shares: list[list[Unit]], repeats: list[int], columns: dict[str, list[Indices]],
    widths: Mapping[str, int],
) -> list[_Number]:  # fmt: skip
    """Returns the numbers of a region that code may use: of heads, key/value heads and columns."""
    width = sum(len(unit.sink) for unit in units)
    number_of = {id(unit): number for number, unit in enumerate(units)}
    heads = tuple(tuple(number_of[id(unit)] for unit in share) for share in shares)
    rows = tuple(tuple(sorted(c for unit in share for c in unit.sink)) for share in shares)
    numbers = [_Number("heads", len(units), tuple(map(len, heads)), heads)]
    groups = list(dict.fromkeys(key_value_groups(units)))
    if len(units) % len(groups) == 0:
        per_group = len(units) // len(groups)
        kept = tuple(
            tuple(
                next(n for n, group in enumerate(groups) if head[at] in group)
                for at in range(0, len(head), step)
            )
            for head, step in zip(heads, repeats, strict=True)
        )
        numbers.append(_Number("kv", len(groups), tuple(map(len, kept)), kept))
        numbers.append(_Number("group", per_group, tuple(repeats)))
        if width % len(units) == 0:
            size = width // len(units)
            values = tuple(len(choice) * size for choice in kept)
            numbers.append(_Number("kv columns", len(groups) * size, values))
            both = tuple(2 * value for value in values)
            numbers.append(_Number("both kv columns", 2 * len(groups) * size, both))
    numbers.append(_Number("columns", width, tuple(map(len, rows)), rows))
    for source, column in columns.items():
        numbers.append(
            _Number(f"columns of {source}", widths[source], tuple(map(len, column)), tuple(column))
        )
    return numbers


def choices_of(
    trace: Trace,
    region: Region,
    shares: list[list[Unit]],
    repeats: list[int],
    columns: dict[str, list[Indices]],
) -> list[list[Choice]]:
    """Returns the possible changes of each attribute, parameter or argument that equals a region's number."""
    widths = {s: trace.calls[s][0].output.shape[-1] for s in region.sources}
    numbers = _numbers(region.units, shares, repeats, columns, widths)
    parameters = list(_parameters(trace, region))
    for place in parameters:
        if place.value > 1 and all(number.whole != place.value for number in numbers if number.indices):
            numbers += _used_indices(trace, region, shares, place)
    numbers += [section for number in numbers for section in _sections(number)]
    places = itertools.chain(
        _attributes(trace, region), parameters, _arguments(trace.blocks[region.block][0])
    )
    found = (_fitting(numbers, place) for place in places if place.value > 1)
    return [choices for choices in found if choices]


def _used_indices(trace: Trace, region: Region, shares: list[list[Unit]], place: _Place) -> Iterator[_Number]:
    """Yields the indices of a parameter's dimension that each rank's columns of the sink depend on.

    They are the channels of a convolution, for example, whose order is not that of a source's columns.
    """
    result = trace.calls[region.sink][0].input
    weights = trace.numbers(*result.shape).to(result.dtype)
    found: list[Indices] = []
    for share in shares:
        columns = sorted(column for unit in share for column in unit.sink)
        own = torch.zeros_like(weights).index_copy(-1, torch.tensor(columns), weights[..., columns])
        (gradient,) = torch.autograd.grad(
            result, [trace.parameters[str(place.place)]], own, retain_graph=True, allow_unused=True
        )
        if gradient is None:
            return
        sizes = gradient.abs().movedim(place.dim, 0).reshape(place.value, -1).amax(1)
        found.append(tuple((sizes > 1e-12 * sizes.max()).nonzero().flatten().tolist()))
    if any(len(indices) < place.value for indices in found):
        yield _Number(f"used in {place.name}", place.value, tuple(map(len, found)), tuple(found))


def _sections(number: _Number) -> Iterator[_Number]:
    """Yields the lengths of sections of which each rank has a part: of queries, of keys and of values."""
    parts = [ranges(indices) for indices in number.indices]
    if not parts or {len(runs) for runs in parts} in ({0}, {1}) or len({len(runs) for runs in parts}) > 1:
        return
    for runs in zip(*parts, strict=True):
        if all(one[1] == other[0] for one, other in itertools.pairwise(runs)):
            lengths = tuple(stop - start for start, stop in runs)
            yield _Number(f"section of {number.name}", sum(lengths), lengths)


@dataclass(frozen=True)
class _Place:
    """A number that a block's code uses, and where it is."""

    kind: str
    place: tuple[str, str] | str | int
    dim: int
    name: str
    value: int


def _attributes(trace: Trace, region: Region) -> Iterator[_Place]:
    inside = region.block + "." if region.block else ""
    for name, module in trace.modules.items():
        if (name != region.block and not name.startswith(inside)) or name in trace.linears:
            continue
        for attribute, value in vars(module).items():
            if type(value) is int:
                yield _Place("attribute", (name, attribute), 0, attribute, value)
        config = vars(module).get("config")
        if config is not None and name == region.block:
            for attribute, value in vars(config).items():
                if type(value) is int and "head" in attribute:
                    yield _Place("attribute", (name, f"config.{attribute}"), 0, attribute, value)


def _parameters(trace: Trace, region: Region) -> Iterator[_Place]:
    for name in region.parameters:
        # An argument that other layers get too, such as T5's relative positions, stays whole.
        if sum(name in used for used in trace.flows.uses.values()) <= 1:
            for dim, length in enumerate(trace.parameters[name].shape):
                yield _Place("parameter", name, dim, name.rpartition(".")[2], length)


def _arguments(call: Any) -> Iterator[_Place]:
    given: list[tuple[str | int, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    for key, value in given:
        if isinstance(value, Tensor) and (not value.requires_grad or key == "position_bias"):
            for dim, length in enumerate(value.shape):
                yield _Place("argument", key, dim, str(key), length)


def _fitting(numbers: list[_Number], place: _Place) -> list[Choice]:
    """Returns the changes of a number that equals some of a region's, the likeliest first."""
    is_attribute = place.kind == "attribute"
    distinct = {
        (number.values, () if is_attribute else number.indices): number
        for number in reversed(numbers)
        if number.whole == place.value and (is_attribute or number.indices)
    }
    ordered = sorted(distinct.values(), key=lambda number: _distance(place.name, number.name))
    return [Choice(place.kind, place.place, place.dim, number) for number in ordered]


def _distance(name: str, number: str) -> int:
    """Sorts likely matches of names first; the order affects speed only, as every choice is checked."""
    hints = {"kv": ("kv", "key_value", "k_head", "key_head"), "group": ("group", "rep"), "heads": ("head",)}
    for place, kind in enumerate(("group", "kv", "heads")):
        if any(hint in name for hint in hints[kind]):
            return 0 if number.startswith(kind) else 1 + place
    return 1 if number == "heads" else 0


def combinations(choices: list[list[Choice]]) -> Iterator[list[Choice]]:
    """Yields no change; all attributes; also parameters and arguments; then every combination.

    An unrelated number can equal one of the region's, but few do: the last ones begin with those that leave
    out all places with one value, and go on with those that differ from the likeliest in the fewest places.
    """
    yield []
    if not choices:
        return
    attributes = [choice[0] for choice in choices if choice[0].kind == "attribute"]
    modules = [
        attribute
        for attribute in attributes
        if isinstance(attribute.place, tuple) and "." not in attribute.place[1]
    ]
    yield modules
    yield attributes
    for other in ("parameter", "argument"):
        yield [*modules, *(choice[0] for choice in choices if choice[0].kind == other)]
    for whole in dict.fromkeys(choice[0].number.whole for choice in choices):
        yield [choice[0] for choice in choices if choice[0].number.whole != whole]
    for count in range(len(choices) + 1):
        for others in itertools.combinations(range(len(choices)), count):
            options: list[list[Choice | None]] = [
                [*choice[1:], None] if place in others else [choice[0]]
                for place, choice in enumerate(choices)
            ]
            for combination in itertools.product(*options):
                yield [choice for choice in combination if choice is not None]


def with_choices(layout: Layout, chosen: list[Choice]) -> Layout:
    """Returns a layout in which ranks that do not run the block padded have the chosen values."""
    changed = Layout(layout.columns, layout.rows, layout.expands)
    for choice in chosen:
        padded = layout.expands
        if choice.kind == "attribute":
            own = zip(choice.number.values, padded, strict=True)
            values = [choice.number.whole if pad else value for value, pad in own]
            changed.attributes[choice.place] = values  # type: ignore[index]
            continue
        everything = tuple(range(choice.number.whole))
        indices = [everything if pad else v for v, pad in zip(choice.number.indices, padded, strict=True)]
        if choice.kind == "parameter":
            changed.parameters[str(choice.place)] = (choice.dim, indices)
        else:
            changed.arguments[choice.place] = (choice.dim, indices)  # type: ignore[index]
    return changed


def _users(units: list[Unit]) -> dict[str, dict[int, frozenset[int]]]:
    """Returns the units that need each column of each source."""
    found: dict[str, dict[int, set[int]]] = {}
    for number, unit in enumerate(units):
        for source, columns in unit.sources.items():
            for column in columns:
                found.setdefault(source, {}).setdefault(column, set()).add(number)
    return {s: {c: frozenset(u) for c, u in users.items()} for s, users in found.items()}


def key_value_groups(units: list[Unit]) -> list[frozenset[int]]:
    """Returns for each unit the units with which it shares a key/value head."""
    groups = [frozenset({number}) for number in range(len(units))]
    shared = sorted({u for user in _users(units).values() for u in user.values() if len(u) > 1}, key=len)
    for members in shared:
        for number in members:
            if len(groups[number]) == 1:
                groups[number] = members
    return groups


def column_orders(
    region: Region, shares: list[list[Unit]]
) -> Iterator[tuple[dict[str, list[Indices]], list[int]]]:
    """Yields orders of a rank's columns, with each rank's number of units per key/value head.

    If a rank's heads begin in the middle of a group, its key/value heads serve different numbers of its query
    heads. Attention needs equal numbers, so the rank then holds copies of key/value heads.
    """
    blocks, repeats = _blocks(region.units, shares)
    orders = (
        {s: [tuple(_needed(s, share)) for share in shares] for s in region.sources},
        {s: _by_block(s, blocks) for s in region.sources},
        {s: _by_section(s, blocks) for s in region.sources},
    )
    seen: list[dict[str, list[Indices]]] = []
    for order in orders:
        if order not in seen:
            seen.append(order)
            yield order, repeats


def _blocks(units: list[Unit], shares: list[list[Unit]]) -> tuple[list[list[list[Unit]]], list[int]]:
    """Divides each rank's units into blocks of equal length that share a key/value head; returns the lengths
    too."""
    groups = key_value_groups(units)
    number_of = {id(unit): number for number, unit in enumerate(units)}
    blocks: list[list[list[Unit]]] = []
    repeats: list[int] = []
    for share in shares:
        runs = [list(run) for _, run in itertools.groupby(share, lambda unit: groups[number_of[id(unit)]])]
        lengths = {len(run) for run in runs}
        step = math.gcd(*lengths) if lengths else 1
        blocks.append([run[at : at + step] for run in runs for at in range(0, len(run), step)])
        repeats.append(step)
    return blocks, repeats


def _needed(source: str, units: list[Unit]) -> list[int]:
    return sorted({column for unit in units for column in unit.sources.get(source, ())})


def _by_block(source: str, blocks: list[list[list[Unit]]]) -> list[Indices]:
    """Returns each rank's columns of a source, block after block."""
    return [tuple(c for block in part for c in _needed(source, block)) for part in blocks]


def _by_section(source: str, blocks: list[list[list[Unit]]]) -> list[Indices]:
    """Returns each rank's columns of a source that has a section for queries, for keys and for values: the
    first run of columns of each block, then the second of each, and so on."""
    found = []
    for part in blocks:
        runs = [ranges(_needed(source, block)) for block in part]
        if len({len(run) for run in runs}) > 1:
            return _by_block(source, blocks)
        sections = itertools.chain.from_iterable(zip(*runs, strict=True))
        found.append(tuple(c for start, stop in sections for c in range(start, stop)))
    return found
