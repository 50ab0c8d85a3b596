"""Which memory nodes share which ranks, so that ranks have equal cores from as few nodes as possible.

Ranks of equal size rarely fit the nodes exactly: of 3 ranks on 2 nodes of 4 cores, one has to reach
across. Nodes and ranks that share cores form groups, and a group of n nodes and m ranks has at least
n + m - 1 pairs of a rank and a node it uses. Over all groups that sum is least when there are the most
groups, so that is what is looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import TypeAlias

Counts: TypeAlias = tuple[int, ...]
"""Cores of one node or of several: one number for each sort of core that ranks get equal shares of."""

Candidates: TypeAlias = Callable[
    [tuple[Counts, ...]], Iterator[tuple[tuple[Counts, ...], tuple[Counts, ...]]]
]

# Below this many states every way to group is weighed, in milliseconds: any machine of up to 8 nodes, and
# larger ones whose nodes are mostly alike. Above it, only nodes next to each other are grouped.
_MOST_STATES = 256


@dataclass(frozen=True)
class NodeGroup:
    """Nodes, by position in what was given, that have cores for ``ranks`` ranks."""

    nodes: tuple[int, ...]
    ranks: int


@dataclass(frozen=True)
class _Grouping:
    """Groups of nodes, and the fewest and the most ranks that they can hold."""

    groups: tuple[tuple[Counts, ...], ...] = ()
    fewest: int = 0
    most: int = 0

    def covers(self, other: _Grouping) -> bool:
        return (
            len(self.groups) >= len(other.groups) and self.fewest <= other.fewest and self.most >= other.most
        )


def group_nodes(
    counts: Sequence[Counts], ranks: int, nearest: Callable[[list[int], Iterable[int]], int]
) -> list[NodeGroup]:
    """Splits nodes into the most groups within which whole ranks get equal shares.

    ``counts`` gives what each node has, ``ranks`` is at most the number of all cores, and every rank
    will get as much of each count as any other, give or take one. ``nearest(group, others)`` tells which
    of ``others`` lies nearest to the nodes of ``group``.
    """
    shares = tuple(total // ranks for total in _totals(counts))
    types = sorted(set(counts), reverse=True)
    is_small = prod(counts.count(each) + 1 for each in types) <= _MOST_STATES
    remaining = tuple(sorted(counts, reverse=True) if is_small else counts)
    best = max(
        (
            grouping
            for grouping in _groupings(remaining, shares, _subsets if is_small else _prefixes)
            if grouping.fewest <= ranks <= grouping.most
        ),
        key=lambda grouping: len(grouping.groups),
    )
    placed = _place(best.groups, counts, nearest) if is_small else _consecutive(best.groups)
    limits = [_rank_limits(group, shares) for group in best.groups]
    held = [fewest for fewest, _ in limits]
    for index, (fewest, most) in enumerate(limits):
        held[index] += min(most - fewest, ranks - sum(held))
    return [NodeGroup(tuple(nodes), m) for nodes, m in zip(placed, held, strict=True)]


def _totals(counts: Iterable[Counts]) -> Counts:
    return tuple(map(sum, zip(*counts, strict=True)))


def _rank_limits(group: Iterable[Counts], shares: Counts) -> tuple[int, int]:
    """The fewest and the most ranks that can share a group evenly; impossible where these cross."""
    totals = _totals(group)
    fewest = max(-(-total // (share + 1)) for total, share in zip(totals, shares, strict=True))
    most = min(total // share for total, share in zip(totals, shares, strict=True) if share)
    return fewest, most


def _groupings(remaining: tuple[Counts, ...], shares: Counts, candidates: Candidates) -> list[_Grouping]:
    """The ways to group all nodes that no other way is better than in every respect."""

    @cache
    def solve(remaining: tuple[Counts, ...]) -> list[_Grouping]:
        if not remaining:
            return [_Grouping()]
        found: list[_Grouping] = []
        for group, rest in candidates(remaining):
            fewest, most = _rank_limits(group, shares)
            if fewest > most:
                continue
            for other in solve(rest):
                new = _Grouping((group, *other.groups), fewest + other.fewest, most + other.most)
                if not any(each.covers(new) for each in found):
                    found = [each for each in found if not new.covers(each)] + [new]
        return found

    return solve(remaining)


def _subsets(remaining: tuple[Counts, ...]) -> Iterator[tuple[tuple[Counts, ...], tuple[Counts, ...]]]:
    """Every different group that the first node can be in, and what is left."""
    others = sorted(set(remaining[1:]), reverse=True)
    for taken in product(*(range(remaining[1:].count(each) + 1) for each in others)):
        group, rest = [remaining[0]], list(remaining[1:])
        for each, number in zip(others, taken, strict=True):
            group += [each] * number
            for _ in range(number):
                rest.remove(each)
        yield tuple(group), tuple(rest)


def _prefixes(remaining: tuple[Counts, ...]) -> Iterator[tuple[tuple[Counts, ...], tuple[Counts, ...]]]:
    """Every group of the first node and those that follow it."""
    for end in range(1, len(remaining) + 1):
        yield remaining[:end], remaining[end:]


def _consecutive(groups: Iterable[tuple[Counts, ...]]) -> list[list[int]]:
    placed, first = [], 0
    for group in groups:
        placed.append(list(range(first, first + len(group))))
        first += len(group)
    return placed


def _place(
    groups: Sequence[tuple[Counts, ...]],
    counts: Sequence[Counts],
    nearest: Callable[[list[int], Iterable[int]], int],
) -> list[list[int]]:
    """Chooses nodes that have the cores a group asks for and lie near each other."""
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
