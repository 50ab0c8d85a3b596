"""Groups memory nodes and ranks, so that ranks get equal numbers of cores from as few nodes as possible.

Ranks of equal size rarely fit the nodes exactly: of 3 ranks on 2 nodes of 4 cores, one needs cores of both
nodes. Nodes and ranks that share cores form groups, and a group of n nodes and m ranks has at least
n + m - 1 pairs of a rank and a node that it uses. The sum over all groups is smallest for the most groups,
so this module looks for the most groups.

The problem contains bin packing, so no fast method is always exact. If there are few states, all of them are
compared. Otherwise the better of two answers is used: the best groups of consecutive nodes, and the result of
a limited search (``group_search.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import TypeAlias

from acclimate.launch.binding.group_search import Counts, GroupSearch, rank_limits

Nearest: TypeAlias = Callable[[list[int], Iterable[int]], int]

Candidates: TypeAlias = Callable[
    [tuple[Counts, ...]], Iterator[tuple[tuple[Counts, ...], tuple[Counts, ...]]]
]

# Below this many states all groupings are compared, in milliseconds: on any machine of up to 8 nodes, and on
# larger ones whose nodes are mostly the same.
_MOST_STATES = 256


@dataclass(frozen=True)
class NodeGroup:
    """Nodes, as positions in the input, with cores for ``ranks`` ranks."""

    nodes: tuple[int, ...]
    ranks: int


@dataclass(frozen=True)
class _Grouping:
    """Groups of nodes, with the fewest and the most ranks that they can hold."""

    groups: tuple[tuple[Counts, ...], ...] = ()
    fewest: int = 0
    most: int = 0

    def covers(self, other: _Grouping) -> bool:
        return (
            len(self.groups) >= len(other.groups) and self.fewest <= other.fewest and self.most >= other.most
        )


def group_nodes(counts: Sequence[Counts], ranks: int, nearest: Nearest) -> list[NodeGroup]:
    """Splits nodes into the most groups within which whole ranks get equal shares.

    Args:
        counts: the cores of each node, by type. Ranks' shares of a type differ by at most one.
        ranks: the number of ranks, at most that of all cores.
        nearest: ``nearest(group, others)`` returns the one of ``others`` that is nearest to ``group``.
    """
    shares = tuple(sum(of_all) // ranks for of_all in zip(*counts, strict=True))
    if prod(counts.count(count) + 1 for count in set(counts)) <= _MOST_STATES:
        ordered = tuple(sorted(counts, reverse=True))
        placed = _place(_most_groups(ordered, shares, ranks, _subsets), counts, nearest)
    else:
        row = _most_groups(tuple(counts), shares, ranks, _prefixes)
        found = GroupSearch(counts, shares, ranks).most_groups(at_least=len(row))
        placed = _consecutive(row) if found is None else _place(found, counts, nearest)
    limits = [rank_limits([counts[node] for node in group], shares) for group in placed]
    held = [fewest for fewest, _ in limits]
    for index, (fewest, most) in enumerate(limits):
        held[index] += min(most - fewest, ranks - sum(held))
    return [NodeGroup(tuple(nodes), m) for nodes, m in zip(placed, held, strict=True)]


def _most_groups(
    remaining: tuple[Counts, ...], shares: Counts, ranks: int, candidates: Candidates
) -> tuple[tuple[Counts, ...], ...]:
    possible = (
        grouping
        for grouping in _groupings(remaining, shares, candidates)
        if grouping.fewest <= ranks <= grouping.most
    )
    return max(possible, key=lambda grouping: len(grouping.groups)).groups


def _groupings(remaining: tuple[Counts, ...], shares: Counts, candidates: Candidates) -> list[_Grouping]:
    """Returns the groupings of all nodes, without those that another grouping dominates."""

    @cache
    def solve(remaining: tuple[Counts, ...]) -> list[_Grouping]:
        if not remaining:
            return [_Grouping()]
        found: list[_Grouping] = []
        for group, rest in candidates(remaining):
            fewest, most = rank_limits(group, shares)
            if fewest > most:
                continue
            for other in solve(rest):
                new = _Grouping((group, *other.groups), fewest + other.fewest, most + other.most)
                if not any(old.covers(new) for old in found):
                    found = [old for old in found if not new.covers(old)] + [new]
        return found

    return solve(remaining)


def _subsets(remaining: tuple[Counts, ...]) -> Iterator[tuple[tuple[Counts, ...], tuple[Counts, ...]]]:
    """Yields every different group with the first node, and the remaining nodes."""
    others = sorted(set(remaining[1:]), reverse=True)
    for taken in product(*(range(remaining[1:].count(other) + 1) for other in others)):
        group, rest = [remaining[0]], list(remaining[1:])
        for pattern, number in zip(others, taken, strict=True):
            group += [pattern] * number
            for _ in range(number):
                rest.remove(pattern)
        yield tuple(group), tuple(rest)


def _prefixes(remaining: tuple[Counts, ...]) -> Iterator[tuple[tuple[Counts, ...], tuple[Counts, ...]]]:
    """Yields every group of the first node and later ones."""
    for end in range(1, len(remaining) + 1):
        yield remaining[:end], remaining[end:]


def _consecutive(groups: Iterable[tuple[Counts, ...]]) -> list[list[int]]:
    placed, first = [], 0
    for group in groups:
        placed.append(list(range(first, first + len(group))))
        first += len(group)
    return placed


def _place(groups: Sequence[Sequence[Counts]], counts: Sequence[Counts], nearest: Nearest) -> list[list[int]]:
    """Chooses nodes that have a group's cores and are near each other."""
    free = set(range(len(counts)))
    placed: list[list[int]] = [[] for _ in groups]
    for index in sorted(range(len(groups)), key=lambda index: -len(groups[index])):
        wanted = list(groups[index])
        while wanted:
            fitting = [node for node in sorted(free) if counts[node] in wanted]
            node = nearest(placed[index], fitting)
            placed[index].append(node)
            wanted.remove(counts[node])
            free.remove(node)
    return placed
