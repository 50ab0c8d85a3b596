"""Promises of acclimate.launch.binding.cores on any machine there may be, made by Hypothesis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from bindings import assert_sound, first_threads, nodes_of
from hypothesis import given, settings
from hypothesis import strategies as st

from acclimate.host.topology import Core, MemoryNode, Topology, format_cpu_list
from acclimate.launch.binding.cores import bind_ranks
from machine_trees import GIB


@st.composite
def topologies(draw: st.DrawFn, most_nodes: int = 9, most_cores: int = 6) -> Topology:
    """Any machine: holes in all numbers, nodes without memory or cores, two kinds of core, 1 or 2 threads."""
    indices = draw(st.lists(st.integers(0, 99), min_size=1, max_size=most_nodes, unique=True))
    sizes = [draw(st.integers(0, most_cores)) for _ in indices]
    sizes[0] = max(1, sizes[0])
    numbers = draw(st.permutations(range(2 * sum(sizes))))
    threads = draw(st.sampled_from([1, 2]))
    hybrid = draw(st.booleans())
    cores: list[Core] = []
    nodes: list[MemoryNode] = []
    for index, size in zip(indices, sizes, strict=True):
        own = []
        for _ in range(size):
            position = 2 * len(cores)
            kind = draw(st.sampled_from(["performance", "efficiency"])) if hybrid else "performance"
            cpus = tuple(sorted(numbers[position : position + threads]))
            cores.append(Core(cpus, draw(st.integers(0, 2)), index, 0, kind))
            own += cpus
        memory = draw(st.sampled_from([GIB, GIB, GIB, 0]))
        distances = {other: 10 if other == index else draw(st.integers(11, 80)) for other in indices}
        nodes.append(MemoryNode(index, tuple(sorted(own)), memory, distances))
    online = sorted(cpu for core in cores for cpu in core.cpus)
    allowed = draw(st.one_of(st.just(set(online)), st.sets(st.sampled_from(online), min_size=1)))
    memory_nodes = draw(st.sets(st.sampled_from(indices), min_size=1))
    return Topology(
        tuple(sorted(nodes, key=lambda node: node.index)),
        tuple(sorted(cores, key=lambda core: core.cpus)),
        frozenset(allowed),
        frozenset(memory_nodes),
    )


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a machine that tells nothing about its memory but what the topology says."""
    return tmp_path_factory.mktemp("bare")


@given(topology=topologies(), data=st.data())
def test_on_any_machine_all_allowed_cores_are_shared_soundly(
    bare: Path, topology: Topology, data: st.DataObject
) -> None:
    ranks = data.draw(st.integers(1, len(topology.usable_cores())))
    if data.draw(st.booleans()):
        bindings = bind_ranks(topology, ranks, use_hyperthreads=True, root=bare)
        assert_sound(topology, bindings, topology.usable_cores())
    else:
        assert_sound(topology, bind_ranks(topology, ranks, root=bare), first_threads(topology))


@given(topology=topologies(), data=st.data())
def test_on_any_machine_exactly_the_listed_cpus_are_shared(
    bare: Path, topology: Topology, data: st.DataObject
) -> None:
    listed = data.draw(st.sets(st.sampled_from(sorted(topology.allowed_cpus)), min_size=1))
    only_these = replace(topology, allowed_cpus=frozenset(listed))
    ranks = data.draw(st.integers(1, len(only_these.usable_cores())))
    bindings = bind_ranks(topology, ranks, core_list=format_cpu_list(listed), root=bare)
    assert_sound(only_these, bindings, only_these.usable_cores())


def fewest_pairs(sizes: tuple[int, ...], ranks: int) -> int:
    """By trying everything: the fewest pairs of a rank and a node that it has cores of."""
    share, left = divmod(sum(sizes), ranks)

    @cache
    def best(free: tuple[int, ...], larger: int, smaller: int) -> int:
        if not larger + smaller:
            return 0
        wanted, rest = (share + 1, (larger - 1, smaller)) if larger else (share, (larger, smaller - 1))
        return min(used + best(tuple(sorted(after)), *rest) for used, after in ways(free, wanted))

    return best(tuple(sorted(sizes)), left, ranks - left)


def ways(free: tuple[int, ...], wanted: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each way to take cores from nodes: how many nodes it uses, and what it leaves."""
    if not free:
        if not wanted:
            yield 0, ()
        return
    for taken in range(min(free[0], wanted) + 1):
        for used, after in ways(free[1:], wanted - taken):
            yield used + (taken > 0), (free[0] - taken, *after)


def plain_topology(sizes: Sequence[int]) -> Topology:
    nodes, cores = [], []
    for index, size in enumerate(sizes):
        cpus = tuple(range(len(cores), len(cores) + size))
        nodes.append(MemoryNode(index, cpus, GIB, {}))
        cores += [Core((cpu,), 0, index, 0, "performance") for cpu in cpus]
    everything = frozenset(range(len(cores)))
    return Topology(tuple(nodes), tuple(cores), everything, frozenset(range(len(sizes))))


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), data=st.data())
def test_on_any_machine_cores_come_from_as_few_memory_nodes_as_can_be(
    bare: Path, sizes: list[int], data: st.DataObject
) -> None:
    ranks = data.draw(st.integers(1, sum(sizes)))
    topology = plain_topology(sizes)
    pairs = sum(len(nodes_of(topology, binding)) for binding in bind_ranks(topology, ranks, root=bare))
    assert pairs == fewest_pairs(tuple(sizes), ranks)


@settings(max_examples=12)
@given(sizes=st.lists(st.integers(1, 9), min_size=10, max_size=40), data=st.data())
def test_very_many_unlike_nodes_are_never_shared_worse_than_in_one_row(
    bare: Path, sizes: list[int], data: st.DataObject
) -> None:
    ranks = data.draw(st.integers(1, sum(sizes)))
    topology = plain_topology(sizes)
    bindings = bind_ranks(topology, ranks, root=bare)
    assert_sound(topology, bindings, topology.cores)
    pairs = sum(len(nodes_of(topology, binding)) for binding in bindings)
    assert pairs <= len(sizes) + ranks - 1
    # No two ranks share two nodes: one of them could have had more of one, the other of the other.
    for one, other in combinations((set(nodes_of(topology, binding)) for binding in bindings), 2):
        assert len(one & other) <= 1
