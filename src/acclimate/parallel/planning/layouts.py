"""Distributes a region's units over ranks, and checks that the block between its sources and its sink works.

A block runs compact if its code works with a rank's own heads, if necessary with other values of attributes
such as ``num_heads``. Otherwise it runs padded: it sees zeros in place of the other ranks' columns. Before
either is used, it is compared with the whole block on random numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.parallel.planning.coupled_columns import Unit
from acclimate.parallel.planning.regions import Region
from acclimate.parallel.planning.shares import even_shares, kernel_multiple
from acclimate.parallel.tracing.trace import Trace

MOST_TRIALS = 256
TOLERANCE = 1e-4
Indices = tuple[int, ...]


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


@dataclass(frozen=True)
class _Role:
    """A number of the whole region, and its value on each rank."""

    name: str
    whole: int
    values: tuple[int, ...]
    indices: tuple[Indices, ...] = ()


@dataclass(frozen=True)
class _Choice:
    """One attribute, parameter or argument that a rank may have to change, and its new value."""

    kind: str
    place: tuple[str, str] | str | int
    dim: int
    role: _Role


def lay_out(trace: Trace, region: Region, size: int) -> Layout | None:
    """Returns a layout that reproduces the whole block's results, or ``None``."""
    units = region.units
    single = all(len(unit.sink) == 1 for unit in units)
    shares = _shares(units, size, kernel_multiple(len(units), size) if single else 1)
    rows = [tuple(sorted(column for unit in share for column in unit.sink)) for share in shares]
    outputs = {region.leaf(s): _random(trace, trace.calls[s][0].output) for s in region.sources}
    whole = _inputs_of_sinks(trace, region, outputs)
    for columns, repeats in _orders(region, units, shares):
        layout = Layout(columns, rows, [not share for share in shares])
        proof = _Proof(trace, region, outputs, whole, layout)
        choices = _choices(trace, region, units, shares, repeats, columns)
        for chosen in itertools.islice(_combinations(choices), MOST_TRIALS):
            tried = _apply(layout, chosen)
            if all(proof.holds(tried, rank) for rank in range(size)):
                needed = _least(proof, layout, chosen, size)
                return _with_counts(proof, layout, needed, choices, size)
    distinct = {s: [tuple(sorted(set(each))) for each in columns[s]] for s in region.sources}
    layout = Layout(distinct, rows, [True] * size)
    proof = _Proof(trace, region, outputs, whole, layout)
    return layout if all(proof.holds(layout, rank) for rank in range(size)) else None


def holds_for(trace: Trace, region: Region, layout: Layout, size: int) -> bool:
    """Tells whether a layout that works for a similar region also works for this one."""
    outputs = {region.leaf(s): _random(trace, trace.calls[s][0].output) for s in region.sources}
    proof = _Proof(trace, region, outputs, _inputs_of_sinks(trace, region, outputs), layout)
    return all(proof.holds(layout, rank) for rank in range(size))


def _inputs_of_sinks(trace: Trace, region: Region, outputs: Mapping[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        seen = trace.replay(region.block, outputs, through=region.through).seen
    return [seen[name][0] for name in (region.sink, *region.twins)]


def _least(proof: _Proof, layout: Layout, chosen: list[_Choice], size: int) -> list[_Choice]:
    """Drops unneeded changes, which arise because unrelated numbers can have the same value."""
    for choice in chosen:
        place = choice.place
        named = isinstance(place, tuple) and "." not in place[1] and _is_of_heads(place[1])
        fewer = [each for each in chosen if each is not choice]
        if not named and all(proof.holds(_apply(layout, fewer), rank) for rank in range(size)):
            chosen = fewer
    return chosen


def _with_counts(
    proof: _Proof, layout: Layout, chosen: list[_Choice], choices: list[list[_Choice]], size: int
) -> Layout:
    """Also changes head counts that this run did not use; a call with a mask, for example, may use them."""
    places = {choice.place for choice in chosen}
    for choice, *_ in choices:
        place = choice.place
        if place in places or not isinstance(place, tuple) or not _is_count_of_heads(place[1]):
            continue
        more = [*chosen, choice]
        if all(proof.holds(_apply(layout, more), rank) for rank in range(size)):
            chosen = more
    return _apply(layout, chosen)


def _is_count_of_heads(name: str) -> bool:
    return _is_of_heads(name) and not any(hint in name for hint in (".", "dim", "size"))


def _is_of_heads(name: str) -> bool:
    return any(hint in name for hint in ("head", "kv", "key_value", "group"))


def _random(trace: Trace, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=trace.random, dtype=torch.float64).to(like.dtype)


def _shares(units: list[Unit], size: int, multiple: int) -> list[list[Unit]]:
    return [units[share.start : share.stop] for share in even_shares(len(units), size, multiple)]


# -- columns -----------------------------------------------------------------------------------------


def _users(units: list[Unit]) -> dict[str, dict[int, frozenset[int]]]:
    """Returns the units that need each column of each source."""
    found: dict[str, dict[int, set[int]]] = {}
    for number, unit in enumerate(units):
        for source, columns in unit.sources.items():
            for column in columns:
                found.setdefault(source, {}).setdefault(column, set()).add(number)
    return {s: {c: frozenset(u) for c, u in each.items()} for s, each in found.items()}


def _groups(units: list[Unit]) -> list[frozenset[int]]:
    """Returns for each unit the units with which it shares a key/value head."""
    groups = [frozenset({number}) for number in range(len(units))]
    shared = sorted({u for each in _users(units).values() for u in each.values() if len(u) > 1}, key=len)
    for members in shared:
        for number in members:
            if len(groups[number]) == 1:
                groups[number] = members
    return groups


def _orders(
    region: Region, units: list[Unit], shares: list[list[Unit]]
) -> Iterator[tuple[dict[str, list[Indices]], list[int]]]:
    """Yields orders of a rank's columns, with each rank's number of units per key/value head.

    If a rank's heads begin in the middle of a group, its key/value heads serve different numbers of its query
    heads. Attention needs equal numbers, so the rank then holds copies of key/value heads.
    """
    groups = _groups(units)
    number_of = {id(unit): number for number, unit in enumerate(units)}
    blocks: list[list[list[Unit]]] = []
    repeats: list[int] = []
    for share in shares:
        runs = [list(run) for _, run in itertools.groupby(share, lambda unit: groups[number_of[id(unit)]])]
        lengths = {len(run) for run in runs}
        step = math.gcd(*lengths) if lengths else 1
        blocks.append([run[at : at + step] for run in runs for at in range(0, len(run), step)])
        repeats.append(step)

    def needed(source: str, some: list[Unit]) -> list[int]:
        return sorted({column for unit in some for column in unit.sources.get(source, ())})

    def by_block(source: str) -> list[Indices]:
        return [tuple(c for block in each for c in needed(source, block)) for each in blocks]

    def by_section(source: str) -> list[Indices]:
        found = []
        for each in blocks:
            runs = [_runs(needed(source, block)) for block in each]
            if len({len(run) for run in runs}) > 1:
                return by_block(source)
            found.append(tuple(c for section in zip(*runs, strict=True) for run in section for c in run))
        return found

    ascending = {s: [tuple(needed(s, share)) for share in shares] for s in region.sources}
    seen: list[dict[str, list[Indices]]] = []
    orders = (
        ascending,
        {s: by_block(s) for s in region.sources},
        {s: by_section(s) for s in region.sources},
    )
    for order in orders:
        if order not in seen:
            seen.append(order)
            yield order, repeats


def _runs(columns: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for column in columns:
        if runs and runs[-1][-1] + 1 == column:
            runs[-1].append(column)
        else:
            runs.append([column])
    return runs


# -- what may have to change -------------------------------------------------------------------------


def _roles(
    units: list[Unit], shares: list[list[Unit]], repeats: list[int], columns: dict[str, list[Indices]],
    widths: Mapping[str, int], width: int,
) -> list[_Role]:  # fmt: skip
    """Returns the numbers of a region that code may use: of heads, key/value heads and columns."""
    number_of = {id(unit): number for number, unit in enumerate(units)}
    heads = tuple(tuple(number_of[id(unit)] for unit in share) for share in shares)
    rows = tuple(tuple(sorted(c for unit in share for c in unit.sink)) for share in shares)
    roles = [_Role("heads", len(units), tuple(map(len, heads)), heads)]
    groups = list(dict.fromkeys(_groups(units)))
    if len(units) % len(groups) == 0:
        per_group = len(units) // len(groups)
        kept = tuple(
            tuple(
                next(n for n, group in enumerate(groups) if each[at] in group)
                for at in range(0, len(each), step)
            )
            for each, step in zip(heads, repeats, strict=True)
        )
        roles.append(_Role("kv", len(groups), tuple(map(len, kept)), kept))
        roles.append(_Role("group", per_group, tuple(repeats)))
        if width % len(units) == 0:
            size = width // len(units)
            values = tuple(len(each) * size for each in kept)
            roles.append(_Role("kv columns", len(groups) * size, values))
            roles.append(_Role("both kv columns", 2 * len(groups) * size, tuple(2 * each for each in values)))
    roles.append(_Role("columns", width, tuple(map(len, rows)), rows))
    for source, each in columns.items():
        roles.append(_Role(f"columns of {source}", widths[source], tuple(map(len, each)), tuple(each)))
    return roles


def _choices(
    trace: Trace, region: Region, units: list[Unit], shares: list[list[Unit]], repeats: list[int],
    columns: dict[str, list[Indices]],
) -> list[list[_Choice]]:  # fmt: skip
    """Returns the possible changes of each attribute, parameter or argument that equals a region's number."""
    widths = {s: trace.calls[s][0].output.shape[-1] for s in region.sources}
    roles = _roles(units, shares, repeats, columns, widths, sum(len(unit.sink) for unit in units))
    found: list[list[_Choice]] = []

    def offer(kind: str, place: tuple[str, str] | str | int, dim: int, name: str, value: int) -> None:
        fitting = [role for role in roles if role.whole == value and value > 1]
        if kind != "attribute":
            fitting = [role for role in fitting if role.indices]
        distinct = {
            (role.values, () if kind == "attribute" else role.indices): role for role in reversed(fitting)
        }
        ordered = sorted(distinct.values(), key=lambda role: _distance(name, role.name))
        if ordered:
            found.append([_Choice(kind, place, dim, role) for role in ordered])

    inside = region.block + "." if region.block else ""
    for name, module in trace.modules.items():
        if (name != region.block and not name.startswith(inside)) or name in trace.linears:
            continue
        for attribute, value in vars(module).items():
            if type(value) is int:
                offer("attribute", (name, attribute), 0, attribute, value)
        config = vars(module).get("config")
        if config is not None and name == region.block:
            for attribute, value in vars(config).items():
                if type(value) is int and "head" in attribute:
                    offer("attribute", (name, f"config.{attribute}"), 0, attribute, value)
    for name in region.parameters:
        # An argument that other layers get too, such as T5's relative positions, stays whole.
        if sum(name in used for used in trace.flows.uses.values()) > 1:
            continue
        for dim, length in enumerate(trace.parameters[name].shape):
            offer("parameter", name, dim, name.rpartition(".")[2], length)
    first = trace.blocks[region.block][0]
    given: list[tuple[str | int, Any]] = [*enumerate(first.args), *first.kwargs.items()]
    for key, value in given:
        if (isinstance(value, Tensor) and not value.requires_grad) or key == "position_bias":
            for dim, length in enumerate(value.shape if isinstance(value, Tensor) else ()):
                offer("argument", key, dim, str(key), length)
    return found


def _distance(name: str, role: str) -> int:
    """Sorts likely matches of names first; the order affects speed only, as every choice is checked."""
    hints = {"kv": ("kv", "key_value"), "group": ("group", "rep"), "heads": ("head",)}
    for place, kind in enumerate(("group", "kv", "heads")):
        if any(hint in name for hint in hints[kind]):
            return 0 if role.startswith(kind) else 1 + place
    return 1 if role == "heads" else 0


def _combinations(choices: list[list[_Choice]]) -> Iterator[list[_Choice]]:
    """Yields no change; all attributes; also parameters and arguments; then every combination."""
    yield []
    if not choices:
        return
    attributes = [each[0] for each in choices if each[0].kind == "attribute"]
    modules = [each for each in attributes if isinstance(each.place, tuple) and "." not in each.place[1]]
    yield modules
    yield attributes
    for other in ("parameter", "argument"):
        yield [*modules, *(each[0] for each in choices if each[0].kind == other)]
    yield [each[0] for each in choices]
    options: list[list[_Choice | None]] = [[*each, None] for each in choices]
    for combination in itertools.product(*options):
        yield [each for each in combination if each is not None]


def _apply(layout: Layout, chosen: list[_Choice]) -> Layout:
    changed = Layout(layout.columns, layout.rows, layout.expands)
    for choice in chosen:
        padded = layout.expands
        if choice.kind == "attribute":
            own = zip(choice.role.values, padded, strict=True)
            values = [choice.role.whole if pad else value for value, pad in own]
            changed.attributes[choice.place] = values  # type: ignore[index]
            continue
        everything = tuple(range(choice.role.whole))
        indices = [everything if pad else v for v, pad in zip(choice.role.indices, padded, strict=True)]
        if choice.kind == "parameter":
            changed.parameters[str(choice.place)] = (choice.dim, indices)
        else:
            changed.arguments[choice.place] = (choice.dim, indices)  # type: ignore[index]
    return changed


# -- proof -------------------------------------------------------------------------------------------


@dataclass
class _Proof:
    """Runs a block as one rank would, and compares the input of the sink."""

    trace: Trace
    region: Region
    outputs: Mapping[str, Tensor]
    whole: list[Tensor]
    """The inputs of the sink and its twins in the whole model."""
    layout: Layout

    def holds(self, layout: Layout, rank: int) -> bool:
        outputs = {}
        for source in self.region.sources:
            leaf = self.region.leaf(source)
            columns = list(layout.columns[source][rank])
            own = self.outputs[leaf][..., columns]
            if layout.expands[rank]:
                zeros = torch.zeros_like(self.outputs[leaf])
                own = zeros.index_copy(-1, torch.tensor(columns, dtype=torch.long), own)
            outputs[leaf] = own
        values: dict[tuple[str, str], Any] = {key: each[rank] for key, each in layout.attributes.items()}
        # With wrong values a block may raise any exception, which only means that the values are wrong.
        with (
            contextlib.suppress(Exception),
            torch.no_grad(),
            self.trace.changed(values),
            self._parameters(layout, rank),
        ):
            arguments = self._arguments(layout, rank)
            replay = self.trace.replay(self.region.block, outputs, arguments, self.region.through)
            sinks = (self.region.sink, *self.region.twins)
            rows = list(layout.rows[rank])
            return all(
                _is_part(replay.seen[name][0], whole, rows, padded=layout.expands[rank])
                for name, whole in zip(sinks, self.whole, strict=True)
            )
        return False

    @contextlib.contextmanager
    def _parameters(self, layout: Layout, rank: int) -> Iterator[None]:
        undo: list[tuple[nn.Module, str, nn.Parameter | None]] = []
        try:
            for name, (dim, indices) in layout.parameters.items():
                owner, _, last = name.rpartition(".")
                module = self.trace.modules[owner]
                before = module._parameters[last]
                undo.append((module, last, before))
                if before is not None:
                    part = before.detach().index_select(dim, torch.tensor(indices[rank], dtype=torch.long))
                    module._parameters[last] = nn.Parameter(part)
            yield
        finally:
            for module, last, before in undo:
                module._parameters[last] = before

    def _arguments(self, layout: Layout, rank: int) -> Callable[..., Any] | None:
        if not layout.arguments:
            return None

        def select(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            positional, named = list(args), dict(kwargs)
            for key, (dim, indices) in layout.arguments.items():
                owner: Any = positional if isinstance(key, int) else named
                owner[key] = owner[key].index_select(dim, torch.tensor(indices[rank], dtype=torch.long))
            return tuple(positional), named

        return select


def _is_part(seen: Tensor, whole: Tensor, rows: list[int], padded: bool) -> bool:
    if padded:
        seen = seen[..., rows]
    expected = whole[..., rows]
    scale = max(1.0, float(whole.abs().max()))
    return seen.shape == expected.shape and bool(((seen - expected).abs() <= TOLERANCE * scale).all())
