"""In which orders a rank's code may expect the columns of its heads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from acclimate.llm.split.planning.coupled_columns import Unit
from acclimate.llm.split.planning.regions import Indices, Region


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
    groups = key_value_groups(region.units)
    number_of = {id(unit): number for number, unit in enumerate(region.units)}
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
        return [tuple(c for block in part for c in needed(source, block)) for part in blocks]

    def by_section(source: str) -> list[Indices]:
        found = []
        for order in blocks:
            runs = [_runs(needed(source, block)) for block in order]
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
