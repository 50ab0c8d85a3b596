"""What holds for the binding of ranks on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from acclimate.host.topology import Core, Topology, format_cpu_list
from acclimate.launch.binding.cores import RankBinding


def nodes_of(topology: Topology, binding: RankBinding) -> list[int]:
    return [node.index for node in topology.nodes if not set(node.cpus).isdisjoint(binding.cpus)]


def lists(bindings: Sequence[RankBinding]) -> list[str]:
    return [format_cpu_list(binding.cpus) for binding in bindings]


def assert_sound(topology: Topology, bindings: Sequence[RankBinding], cores: Sequence[Core]) -> None:
    """What holds on every machine, where ``cores`` are all that there is to share."""
    given_out = [cpu for binding in bindings for cpu in binding.cpus]
    assert len(given_out) == len(set(given_out)), "a processor was given to two ranks"
    assert set(given_out) <= topology.allowed_cpus, "a processor is outside the allowed set"
    assert sorted(given_out) == sorted(cpu for core in cores for cpu in core.cpus), "not all are used"
    for binding in bindings:
        own = [core for core in cores if set(core.cpus) & set(binding.cpus)]
        assert binding.cpus == tuple(sorted(cpu for core in own for cpu in core.cpus)), "a core is divided"
        assert binding.cores == len(own)
        assert_memory_is_usable(topology, binding)
    for kind in (None, "performance", "efficiency"):
        counts = [
            sum(1 for core in cores if kind in (None, core.kind) and core.cpus[0] in binding.cpus)
            for binding in bindings
        ]
        assert max(counts) - min(counts) <= 1, f"shares of {kind or 'all'} cores differ by more than one"
    keys = [(nodes_of(topology, binding)[0], binding.cpus[0]) for binding in bindings]
    assert [nodes for nodes, _ in keys] == sorted(nodes for nodes, _ in keys), "ranks are out of order"


def assert_memory_is_usable(topology: Topology, binding: RankBinding) -> None:
    homes = {topology.node(index) for index in nodes_of(topology, binding)}
    usable = {node.index for node in homes if node.memory_bytes} & topology.allowed_memory_nodes
    if binding.preferred_memory_node is not None:
        assert binding.memory_nodes == ()
        node = topology.node(binding.preferred_memory_node)
        assert not node.cpus
        assert node.memory_bytes
        assert node.index in topology.allowed_memory_nodes
    else:
        assert set(binding.memory_nodes) == usable


def first_threads(topology: Topology) -> list[Core]:
    return [replace(core, cpus=core.cpus[:1]) for core in topology.usable_cores()]
