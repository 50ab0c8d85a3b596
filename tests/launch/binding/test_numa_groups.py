"""Promises of acclimate.launch.binding.numa_groups: the groups are valid, and as many as there can be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acclimate.launch.binding.numa_groups import Counts, GroupSearch, NodeGroup, group_nodes


def lowest(group: list[int], others: Iterable[int]) -> int:
    return min(others)


def grouped(counts: Sequence[Counts], ranks: int) -> list[NodeGroup]:
    """The groups, after checking that they are valid."""
    groups = group_nodes(counts, ranks, lowest)
    assert sorted(node for group in groups for node in group.nodes) == list(range(len(counts)))
    assert sum(group.ranks for group in groups) == ranks
    for group in groups:
        assert holds(counts, ranks, group.nodes, group.ranks)
    return groups


def holds(counts: Sequence[Counts], ranks: int, nodes: Iterable[int], held: int) -> bool:
    """Whether ``held`` ranks get equal shares, give or take one, of these nodes."""
    nodes = list(nodes)
    for of_all in zip(*counts, strict=True):
        share = sum(of_all) // ranks
        if not held * share <= sum(of_all[node] for node in nodes) <= held * (share + 1):
            return False
    return True


def partitions(nodes: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Every way to divide the nodes into groups."""
    if not nodes:
        yield []
        return
    for others in partitions(nodes[1:]):
        yield [nodes[:1], *others]
        for index, group in enumerate(others):
            yield [*others[:index], (nodes[0], *group), *others[index + 1 :]]


def most_groups(counts: Sequence[Counts], ranks: int) -> int:
    """By trying everything: the most groups there can be."""
    most = 0
    for groups in partitions(tuple(range(len(counts)))):
        possible = {0}  # how many ranks the groups so far can hold together
        for group in groups:
            fits = [held for held in range(1, ranks + 1) if holds(counts, ranks, group, held)]
            possible = {ranks_before + held for ranks_before in possible for held in fits}
        if ranks in possible:
            most = max(most, len(groups))
    return most


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[Counts], int]:
    """Nodes with two sorts of cores and their sum, and a number of ranks."""
    of_two = draw(
        st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)).filter(any), min_size=1, max_size=6)
    )
    if draw(st.booleans()):
        of_two = [(first, 0) for first, _ in of_two if first] or [(1, 0)]
    counts = [(first, second, first + second) for first, second in of_two]
    return counts, draw(st.integers(1, sum(count[2] for count in counts)))


@settings(max_examples=3 * settings.default.max_examples)
@given(machine=machines())
def test_nodes_are_divided_into_as_many_groups_as_trying_every_way_finds(
    machine: tuple[list[Counts], int],
) -> None:
    counts, ranks = machine
    most = most_groups(counts, ranks)
    assert len(grouped(counts, ranks)) == most
    # The search for large machines, which nodes as few as these do not need.
    shares = tuple(sum(of_all) // ranks for of_all in zip(*counts, strict=True))
    found = GroupSearch(counts, shares, ranks).most_groups(at_least=most)
    assert found is not None
    assert len(found) == most


def test_eight_ranks_on_sixteen_unlike_nodes_use_sixteen_pairs_of_a_rank_and_a_node() -> None:
    first = [1, 3, 5, 7, 9, 11, 13, 15]
    counts = [(size,) for size in [*first, *(40 - size for size in first)]]
    groups = grouped(counts, 8)
    assert sum(len(group.nodes) + group.ranks - 1 for group in groups) == 16


@settings(max_examples=settings.default.max_examples)
@given(
    share=st.integers(20, 96),
    parts=st.lists(st.tuples(st.integers(1, 2), st.integers(1, 3)), min_size=4, max_size=8),
    data=st.data(),
)
def test_groups_that_unlike_nodes_were_made_from_are_found_again(
    share: int, parts: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Cuts whole ranks into unlike nodes and shuffles them: there are at least as many groups as before."""
    counts: list[Counts] = []
    for ranks, pieces in parts:
        cuts = data.draw(
            st.lists(st.integers(1, ranks * share - 1), min_size=pieces - 1, max_size=pieces - 1, unique=True)
        )
        ends = [0, *sorted(cuts), ranks * share]
        counts += [(end - start,) for start, end in pairwise(ends)]
    groups = grouped(data.draw(st.permutations(counts)), sum(ranks for ranks, _ in parts))
    assert len(groups) >= len(parts)


def test_groups_of_alike_nodes_are_made_of_nodes_that_lie_near() -> None:
    def nearest(group: list[int], others: Iterable[int]) -> int:
        """Nodes 0 and 2 are near each other, as are 1 and 3."""
        return min(others, key=lambda other: (any((other - core) % 2 for core in group), other))

    groups = group_nodes([(4,)] * 4, 2, nearest)
    assert [group.nodes for group in groups] == [(0, 2), (1, 3)]


@pytest.mark.parametrize("ranks", [1, 7, 48, 64, 127])
def test_sixty_four_nodes_are_grouped(ranks: int) -> None:
    assert grouped([(2,)] * 64, ranks)
