"""Processors and memory nodes of a machine, and which of them this process may use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from acclimate.errors import TopologyError
from acclimate.host.topology.control_groups import cpu_quota, cpuset
from acclimate.host.topology.cores import Core, read_cores
from acclimate.host.topology.kernel_files import (
    LIVE,
    format_cpu_list,
    numbered_entries,
    parse_cpus,
    read,
    read_cpus,
    read_number,
    under,
)

_CPU = "/sys/devices/system/cpu"
_NODE = "/sys/devices/system/node"


@dataclass(frozen=True)
class MemoryNode:
    """One memory node.

    ``cpus`` are its online processors, ascending. ``memory_bytes`` is 0 if it has no memory or the size is
    unknown. ``distances`` maps each node, this one included, to the firmware's distance from here: 10 is
    local, and 20 takes twice as long. It is empty if the distances are unknown.
    """

    index: int
    cpus: tuple[int, ...]
    memory_bytes: int
    distances: Mapping[int, int] = field(hash=False)


@dataclass(frozen=True)
class Topology:
    """The processors and memory of a machine, and which of them this process may use.

    ``nodes`` ascend by index and ``cores`` by first processor; both describe the whole machine.
    ``allowed_cpus`` are the online processors that this process may run on, ``allowed_memory_nodes``
    the nodes that it may take memory from.
    """

    nodes: tuple[MemoryNode, ...]
    cores: tuple[Core, ...]
    allowed_cpus: frozenset[int]
    allowed_memory_nodes: frozenset[int]

    @property
    def online_cpus(self) -> frozenset[int]:
        """All online processors. Each belongs to exactly one node and one core."""
        return frozenset(cpu for node in self.nodes for cpu in node.cpus)

    @property
    def usable_nodes(self) -> tuple[MemoryNode, ...]:
        """The nodes with at least one allowed processor. Nodes without processors do not count."""
        return tuple(node for node in self.nodes if not self.allowed_cpus.isdisjoint(node.cpus))

    def usable_cores(self, node: int | None = None) -> tuple[Core, ...]:
        """The cores of one node or of all nodes, with their allowed threads only; at least one each."""
        cores = (
            replace(core, cpus=tuple(cpu for cpu in core.cpus if cpu in self.allowed_cpus))
            for core in self.cores
            if node is None or core.node == node
        )
        return tuple(core for core in cores if core.cpus)

    def node(self, index: int) -> MemoryNode:
        """The node with this index.

        Raises:
            TopologyError: there is no such node.
        """
        for node in self.nodes:
            if node.index == index:
                return node
        there = format_cpu_list(node.index for node in self.nodes)
        raise TopologyError(f"there is no memory node {index}; this machine has {there}")


def read_topology(root: Path = LIVE, allowed: Iterable[int] | None = None) -> Topology:
    """Reads the machine's topology from ``/sys`` and ``/proc`` under ``root``.

    ``allowed`` are the processors that this process may run on; those that are not online are left out. The
    default is the affinity of this process, or for a recorded machine the one in its ``/proc/self``, within
    the cpuset.

    Without any description of memory nodes (no ``/sys``, not Linux, a kernel without NUMA) there is one node,
    0, with all processors. A processor that no node lists belongs to the lowest node with processors, and one
    that two nodes list belongs to the lower of them.

    Raises:
        TopologyError: a file is there but corrupt.
    """
    online = _online_cpus(root)
    cpus_by_node = _cpus_by_node(root, online)
    nodes = tuple(
        MemoryNode(
            index, tuple(sorted(cpus)), _memory_bytes(root, index), _distances(root, index, cpus_by_node)
        )
        for index, cpus in cpus_by_node.items()
    )
    return Topology(
        nodes=nodes,
        cores=read_cores(root, {node.index: node.cpus for node in nodes}),
        allowed_cpus=online.intersection(_allowed_cpus(root, online) if allowed is None else allowed),
        allowed_memory_nodes=_within(
            frozenset(cpus_by_node), _from_status(root, "Mems_allowed_list"), *cpuset(root, "mems")
        ),
    )


def usable_node_count(root: Path = LIVE) -> int:
    """How many memory nodes have processors that this process may run on; at least 1.

    The number is that of ``read_topology(root).usable_nodes``, but this function reads only a few small files
    and never fails: if a file is corrupt, the answer is 1.
    """
    try:
        online = _online_cpus(root)
        allowed = _allowed_cpus(root, online)
        nodes = _cpus_by_node(root, online).values()
    except TopologyError:
        return 1
    return max(1, sum(not allowed.isdisjoint(cpus) for cpus in nodes))


def processor_limit(root: Path = LIVE, *, claims_work: bool = False) -> int:
    """The number of processors that this process can keep busy: those it may run on, or fewer if a control
    group limits its processor time.

    A quota of 2.5 processors counts as 2. With 3 threads, the kernel would stop all of them in the middle of
    their work.

    Args:
        root: the folder with ``/sys`` and ``/proc``.
        claims_work: threads take the next piece of work when they get to it. A stopped thread then holds up
            one piece, and a quota of 2.5 processors counts as 3.
    """
    try:
        allowed = len(_affinity(root) or _allowed_cpus(root, _online_cpus(root)))
    except TopologyError:
        allowed = os.cpu_count() or 1
    quota = cpu_quota(root)
    if quota is None:
        return allowed
    return max(1, min(allowed, int(quota + 0.5) if claims_work else int(quota)))


# -- processors ----------------------------------------------------------------------------------


def _online_cpus(root: Path) -> frozenset[int]:
    online = read_cpus(under(root, f"{_CPU}/online"))
    if not online:
        folder = under(root, _CPU)
        # A processor that cannot be taken offline, often 0, has no such file.
        online = frozenset(
            n for n in numbered_entries(folder, "cpu") if read_number(f"{folder}/cpu{n}/online") != 0
        )
    if not online:
        cpuinfo = read(under(root, "/proc/cpuinfo")) or ""
        online = frozenset(map(int, re.findall(r"^processor\s*:\s*([0-9]{1,9})\s*$", cpuinfo, re.MULTILINE)))
    # Some containers list fewer processors in /sys than this process may run on.
    online |= _affinity(root) or frozenset()
    return online or frozenset(range(os.cpu_count() or 1))


def _affinity(root: Path) -> frozenset[int] | None:
    if root != LIVE or not hasattr(os, "sched_getaffinity"):  # macOS and Windows have none
        return None
    try:
        return frozenset(os.sched_getaffinity(0))
    except OSError:  # a container's system call filter
        return None


def _allowed_cpus(root: Path, online: frozenset[int]) -> frozenset[int]:
    # The kernel keeps the affinity of a live process within its cpuset, so there is no more to read.
    return _affinity(root) or _within(online, _from_status(root, "Cpus_allowed_list"), *cpuset(root, "cpus"))


def _from_status(root: Path, name: str) -> frozenset[int] | None:
    """The set on a line of this process's status file, ``None`` where it has no such line."""
    path = under(root, "/proc/self/status")
    match = re.search(rf"^{name}:(.*)$", read(path) or "", re.MULTILINE)
    return None if match is None else parse_cpus(match[1], path)


def _within(numbers: frozenset[int], *restrictions: frozenset[int] | None) -> frozenset[int]:
    """Intersects sets; skips a restriction that would leave nothing, because it cannot be this process's."""
    for restriction in restrictions:
        if restriction is not None:
            numbers = numbers & restriction or numbers
    return numbers


# -- memory nodes --------------------------------------------------------------------------------


def _cpus_by_node(root: Path, online: frozenset[int]) -> dict[int, set[int]]:
    """The online processors of each memory node, by ascending index."""
    left = set(online)
    nodes: dict[int, set[int]] = {}
    there = numbered_entries(under(root, _NODE), "node")
    online_nodes = read_cpus(under(root, f"{_NODE}/online")) or frozenset()
    for index in there:
        folder = under(root, f"{_NODE}/node{index}")
        # Old kernels list offline processors too.
        own = left.intersection(read_cpus(f"{folder}/cpulist", f"{folder}/cpumap") or ())
        # A node with online processors is online, even if the list of nodes omits it.
        if own or index in online_nodes or online_nodes.isdisjoint(there):
            nodes[index] = own
            left -= own
    if not nodes:
        return {0: left}
    lowest = min((index for index, cpus in nodes.items() if cpus), default=min(nodes))
    nodes[lowest] |= left
    return nodes


def _memory_bytes(root: Path, index: int) -> int:
    folder = under(root, f"{_NODE}/node{index}")
    # If the kernel describes no memory nodes, all memory is in the single node that represents the machine.
    path = f"{folder}/meminfo" if os.path.isdir(folder) else under(root, "/proc/meminfo")
    text = read(path)
    if text is None:
        return 0
    match = re.search(r"^(?:Node [0-9]+ )?MemTotal:\s*(.*)$", text, re.MULTILINE)
    if match is None:
        return 0
    amount = re.fullmatch(r"([0-9]{1,18}) kB", match[1].strip(), re.ASCII)
    if amount is None:
        raise TopologyError(f'{path} gives MemTotal as "{match[1]}", but must give a number of kB')
    return int(amount[1]) * 1024


def _distances(root: Path, index: int, nodes: Iterable[int]) -> dict[int, int]:
    path = under(root, f"{_NODE}/node{index}/distance")
    words = (read(path) or "").split()
    if not all(word.isdecimal() and len(word) < 10 for word in words):
        raise TopologyError(f'{path} holds "{" ".join(words)[:80]}", but must hold integers')
    # There is one column per online node, without columns for missing node numbers.
    for columns in (list(nodes), numbered_entries(under(root, _NODE), "node")):
        if len(columns) == len(words):
            return dict(zip(columns, map(int, words), strict=True))
    return {}
