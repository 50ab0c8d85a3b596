"""Groups memory nodes and ranks, so that ranks get equal numbers of cores from as few nodes as possible.

Ranks of equal size rarely fit the nodes exactly: of 3 ranks on 2 nodes of 4 cores, one needs cores of both
nodes. Nodes and ranks that share cores form groups, and a group of n nodes and m ranks has at least
n + m - 1 pairs of a rank and a node that it uses. The sum over all groups is smallest for the most groups,
so this module looks for the most groups.

The problem contains bin packing, so no fast method is always exact. If there are few states, all of them are
compared. Otherwise the better of two answers is used: the best groups of consecutive nodes, and the result of
a limited search. That splits off one group after another, and the remaining nodes are always a group, so it
has an answer at any time. It stops when the answer meets an upper bound, when it has tried everything, or
after a fixed number of steps. It uses no clock, so that the same machine always gets the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import TypeAlias

Counts: TypeAlias = tuple[int, ...]
"""Cores of one or several nodes: one number for each type of core, which ranks share equally."""

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


# About half a second in all. A size of groups gets a part of it, so that larger ones are tried too.
_MOST_STEPS = 100_000
_MOST_STEPS_AT_ONCE = 12_500


def rank_limits(nodes: Iterable[Counts], shares: Counts) -> tuple[int, int]:
    """The fewest and the most ranks that can share these nodes evenly; impossible if fewest exceeds most."""
    totals = tuple(map(sum, zip(*nodes, strict=True)))
    fewest = max(-(-total // (share + 1)) for total, share in zip(totals, shares, strict=True))
    most = min(total // share for total, share in zip(totals, shares, strict=True) if share)
    return fewest, most


@dataclass(frozen=True)
class _Pattern:
    """Nodes that can be a group.

    ``uses`` counts the nodes of each type. ``loss`` is the difference between the number of ranks that they
    can hold and their share of all cores: other groups can always complete a group without loss.
    """

    uses: tuple[tuple[int, int], ...]
    size: int
    fewest: int
    most: int
    loss: float


@dataclass(frozen=True)
class _State:
    """A state of the search: the groups so far, and the number of remaining nodes of each type.

    The nodes of ``last`` will be in the last group; those of ``rest`` are not assigned yet.
    """

    rest: tuple[int, ...]
    last: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...] = ()
    fewest: int = 0
    most: int = 0

    def with_group(self, pattern: _Pattern) -> _State:
        group = [0] * len(self.rest)
        for kind, number in pattern.uses:
            group[kind] = number
        rest = tuple(have - taken for have, taken in zip(self.rest, group, strict=True))
        return _State(
            rest,
            self.last,
            (*self.groups, tuple(group)),
            self.fewest + pattern.fewest,
            self.most + pattern.most,
        )

    def with_last(self, kind: int) -> _State:
        rest, last = list(self.rest), list(self.last)
        rest[kind] -= 1
        last[kind] += 1
        return _State(tuple(rest), tuple(last), self.groups, self.fewest, self.most)


class GroupSearch:
    """Looks for the most groups of nodes within which ``ranks`` ranks, taken together, get equal shares.

    Nodes with the same cores are of one type. Two facts keep the search short: if the nodes that are left
    cannot be one group, they cannot be divided into groups either; and a node whose smallest group has k
    nodes adds at most 1/k to the number of groups.
    """

    def __init__(self, counts: Sequence[Counts], shares: Counts, ranks: int) -> None:
        self._types = sorted(set(counts), reverse=True)
        self._available = tuple(counts.count(kind) for kind in self._types)
        self._shares = shares
        self._ranks = ranks
        self._ranks_per_core = ranks / sum(count[-1] for count in counts)
        self._steps = 0
        self._limit = 0
        self._most_groups = 0
        self._best: tuple[tuple[int, ...], ...] | None = None
        self._weights: list[float] = []
        self._seen: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int, int]]] = {}

    def most_groups(self, at_least: int) -> list[list[Counts]] | None:
        """Returns the groups, as their nodes' counts; ``None`` if there are fewer than ``at_least``."""
        self._most_groups = at_least - 1
        patterns: list[_Pattern] = []
        smallest: dict[int, int] = {}
        # All groups but the largest have at most half of the nodes, and the largest may be the rest.
        for size in range(1, max(1, sum(self._available) // 2) + 1):
            self._limit = _MOST_STEPS
            for pattern in self._patterns(size):
                patterns.append(pattern)
                for kind, _ in pattern.uses:
                    smallest.setdefault(kind, size)
            self._weights = [1 / smallest.get(kind, size + 1) for kind in range(len(self._types))]
            # Small groups make many; groups without loss leave the others possible. Neither is always best.
            self._explore_all(sorted(patterns, key=lambda pattern: (pattern.size, pattern.loss)))
            self._explore_all(sorted(patterns, key=lambda pattern: (pattern.loss, pattern.size)))
            if self._steps >= _MOST_STEPS or self._most_groups >= self._bound(self._available):
                break
        if self._best is None:
            return None
        return [
            [core_type for core_type, number in zip(self._types, group, strict=True) for _ in range(number)]
            for group in self._best
        ]

    def _patterns(self, size: int) -> Iterator[_Pattern]:
        """Yields every group of that many nodes, until the steps run out."""

        def choose(first: int, left: int, uses: tuple[tuple[int, int], ...]) -> Iterator[_Pattern]:
            self._steps += 1
            if self._steps >= self._limit or sum(self._available[first:]) < left:
                return
            if not left:
                fewest, most = self._limits(uses)
                if fewest <= most:
                    due = sum(number * self._types[kind][-1] for kind, number in uses) * self._ranks_per_core
                    yield _Pattern(uses, size, fewest, most, max(0.0, fewest - due, due - most))
                return
            for number in range(min(left, self._available[first]), -1, -1):
                yield from choose(first + 1, left - number, (*uses, (first, number)) if number else uses)

        return choose(0, size, ())

    def _limits(self, uses: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """Returns the fewest and the most ranks that can share these numbers of nodes of each type."""
        scaled = (tuple(number * count for count in self._types[kind]) for kind, number in uses)
        return rank_limits(scaled, self._shares)

    def _bound(self, rest: tuple[int, ...]) -> int:
        """Returns an upper bound of the number of groups in ``rest``."""
        weight = sum(number * type_weight for number, type_weight in zip(rest, self._weights, strict=True))
        return min(self._ranks, int(weight + 1e-6))

    def _explore_all(self, patterns: list[_Pattern]) -> None:
        self._seen = {}
        self._limit = min(self._steps + _MOST_STEPS_AT_ONCE, _MOST_STEPS)
        self._explore(_State(self._available, (0,) * len(self._types)), patterns)

    def _explore(self, state: _State, patterns: list[_Pattern]) -> None:
        """Tries all ways to continue from a state with these patterns."""
        left = tuple(map(sum, zip(state.rest, state.last, strict=True)))
        if not any(left):
            self._offer(state.groups, state.fewest, state.most)
            return
        fewest, most = self._limits(enumerate(left))
        if fewest > most or not state.fewest + fewest <= self._ranks <= state.most + most:
            return
        self._offer((*state.groups, left), state.fewest + fewest, state.most + most)
        possible = min(self._bound(state.rest) + any(state.last), self._ranks - state.fewest)
        if len(state.groups) + possible <= self._most_groups or self._is_known(state) or not any(state.rest):
            return
        self._steps += 1 + len(left) + len(patterns)
        fitting = [
            choice for choice in patterns if all(state.rest[kind] >= number for kind, number in choice.uses)
        ]
        choices: list[list[_Pattern]] = [[] for _ in left]
        for pattern in fitting:
            for kind, _ in pattern.uses:
                choices[kind].append(pattern)
        # The type with the fewest choices first, where a wrong choice fails soonest.
        kind = min((kind for kind, number in enumerate(state.rest) if number), key=lambda n: len(choices[n]))
        for pattern in choices[kind]:
            if self._steps >= self._limit:
                return
            self._explore(state.with_group(pattern), fitting)
        self._explore(state.with_last(kind), fitting)

    def _offer(self, groups: tuple[tuple[int, ...], ...], fewest: int, most: int) -> None:
        if len(groups) > self._most_groups and fewest <= self._ranks <= most:
            self._most_groups = len(groups)
            self._best = groups

    def _is_known(self, state: _State) -> bool:
        """Whether the search has already passed here with a path that is no worse in any respect."""
        ways = self._seen.setdefault((state.rest, state.last), [])
        new = len(state.groups), state.fewest, state.most
        if any(way[0] >= new[0] and way[1] <= new[1] and way[2] >= new[2] for way in ways):
            return True
        ways.append(new)
        return False
