"""Finds fast memory among the memory nodes that have no processors, such as HBM in flat mode.

Such a node may also be slow (CXL, persistent memory), belong to a device (the GPUs of Grace Hopper), or be a
slice of other memory (``numa=fake``). Sizes and distances cannot tell these apart, so only speeds that the
kernel or the processor reports count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from acclimate.host.topology.kernel_files import LIVE, numbered_entries, read, read_cpus, read_number, under
from acclimate.host.topology.machine import MemoryNode, Topology

_NODE = "/sys/devices/system/node"
_TIERS = "/sys/devices/virtual/memory_tiering"

# The distance from HBM to its own processors is 13 (Xeon Max) to 31 (Xeon Phi); that of GPU memory on POWER9
# and Grace is 80.
_FARTHEST = 40


def fast_memory_near(topology: Topology, index: int, root: Path = LIVE) -> int | None:
    """Returns the nearest node without processors whose memory is faster for node ``index`` than its own.

    Returns ``None`` if no node is known to be faster, because a node's own memory is never a bad choice. The
    node found must have memory that this process may use, be at most four times the local distance away, and
    belong to node ``index``: the kernel lists ``index`` among its initiators or, if it lists none, ``index``
    is nearer than all other nodes with processors. The first of these rules that applies decides:

    1. Memory of a device (a generic initiator): no.
    2. The memory tiers of the two nodes, where they differ: yes if its tier is the faster one.
    3. The read bandwidths from node ``index`` to both, where firmware gives them (HMAT): yes if its
       bandwidth is greater.
    4. A Xeon Phi, which has no other memory without processors: yes, unless it is as near as node
       ``index`` itself and so a slice of the same memory.

    Raises:
        TopologyError: there is no node ``index``, or a file is corrupt.
    """
    home = topology.node(index)
    candidates = [
        (home.distances.get(node.index, _FARTHEST), node.index)
        for node in topology.nodes
        if not node.cpus
        and node.memory_bytes
        and node.index in topology.allowed_memory_nodes
        and home.distances.get(node.index, 0) <= _FARTHEST
        and _belongs_to(topology, root, home, node)
        and _is_faster(root, home, node)
    ]
    return min(candidates)[1] if candidates else None


def _belongs_to(topology: Topology, root: Path, home: MemoryNode, node: MemoryNode) -> bool:
    if not home.cpus:
        return False
    with_cpus = {other.index: other for other in topology.nodes if other.cpus}
    listed = {initiator for _, initiators in _access_classes(root, node.index) for initiator in initiators}
    if listed := listed.intersection(with_cpus):
        return home.index in listed
    distance = home.distances.get(node.index)
    others = (other for other in with_cpus.values() if other is not home)
    return distance is not None and all(
        other.distances.get(node.index, distance) > distance for other in others
    )


def _is_faster(root: Path, home: MemoryNode, node: MemoryNode) -> bool:
    """Whether a node's memory is known to be faster for the processors of ``home`` than their own."""
    if node.index in (read_cpus(under(root, f"{_NODE}/has_generic_initiator")) or ()):
        return False
    tiers = _tiers(root)
    if home.index in tiers and node.index in tiers and tiers[home.index] != tiers[node.index]:
        return tiers[node.index] < tiers[home.index]
    own, its = (_read_bandwidth(root, home.index, target) for target in (home.index, node.index))
    if own and its:
        return its > own
    return _is_xeon_phi(root) and home.distances.get(node.index) != home.distances.get(home.index)


def _tiers(root: Path) -> dict[int, int]:
    """The memory tier of each node; the kernel gives faster memory a lower number."""
    folder = under(root, _TIERS)
    return {
        node: tier
        for tier in numbered_entries(folder, "memory_tier")
        for node in read_cpus(f"{folder}/memory_tier{tier}/nodelist") or ()
    }


def _access_classes(root: Path, node: int) -> Iterator[tuple[str, list[int]]]:
    """The folders with a node's figures, and the nodes whose processors these figures are for."""
    # access1 counts processors only; access0 also counts devices and is all that older kernels have.
    for access in ("access1", "access0"):
        folder = under(root, f"{_NODE}/node{node}/{access}/initiators")
        yield folder, numbered_entries(folder, "node")


def _read_bandwidth(root: Path, home: int, node: int) -> int | None:
    """Returns the read bandwidth in MB/s from ``home``'s processors to ``node``, as reported by HMAT."""
    for folder, initiators in _access_classes(root, node):
        if home in initiators and (bandwidth := read_number(f"{folder}/read_bandwidth")):
            return bandwidth
    return None


def _is_xeon_phi(root: Path) -> bool:
    # Knights Landing and Knights Mill, by model number, because early ones do not report the name.
    cpuinfo = (read(under(root, "/proc/cpuinfo")) or "")[:4096]
    return bool(
        re.search(r"^vendor_id\s*: GenuineIntel$", cpuinfo, re.MULTILINE)
        and re.search(r"^cpu family\s*: 6$", cpuinfo, re.MULTILINE)
        and re.search(r"^model\s*: (87|133)$", cpuinfo, re.MULTILINE)
    )
