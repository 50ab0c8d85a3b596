"""Tells apart the memory nodes that have no processors: fast memory, slow memory, and device memory."""

from __future__ import annotations

import re
from pathlib import Path

from acclimate.topology.kernel_files import LIVE, numbered_entries, read, read_cpus, read_number, under
from acclimate.topology.machine import MemoryNode, Topology

_NODE = "/sys/devices/system/node"
_TIERS = "/sys/devices/virtual/memory_tiering"

# HBM is at 13 (Xeon Max) to 31 (Xeon Phi) from its own processors; GPU memory on POWER9 and Grace at 80.
_FARTHEST = 40
# The second memory of a machine whose processors are all in one node must be as near as a next socket.
_FARTHEST_UNSTATED = 20


def fast_memory_near(topology: Topology, index: int, root: Path = LIVE) -> int | None:
    """The nearest node of normal memory without processors (HBM in flat mode) for node ``index``, if any.

    Such a node must have memory that this process may use, be at most four times the local distance
    away, and have no node with processors nearer to it. Then what the system says decides, in this
    order: memory that belongs to a device (a generic initiator: the GPUs of Grace Hopper), no; a
    memory tier above or below that of node ``index``, yes or no; a read bandwidth greater or not
    greater than that of node ``index``, yes or no; memory handed out through DAX (persistent memory,
    CXL), no; a Xeon Phi, yes, as there is no other core-less memory; memory that only holds movable
    pages (hot-plugged), no. Where it says nothing: yes only if the node is no larger than node
    ``index`` and nearer to it than any other node with processors. When unsure, the answer is no:
    memory of the own node is never a bad choice.

    Raises:
        TopologyError: there is no node ``index``, or a file is corrupt.
    """
    home = topology.node(index)
    with_cpus = [node for node in topology.nodes if node.cpus]
    candidates = []
    for node in topology.nodes:
        distance = home.distances.get(node.index)
        if node.cpus or not node.memory_bytes or node.index not in topology.allowed_memory_nodes:
            continue
        if distance is None or distance > _FARTHEST or not home.cpus:
            continue
        if any(other.distances.get(node.index, distance) < distance for other in with_cpus):
            continue
        is_fast = _stated_fast(root, home.index, node.index)
        if is_fast is None:
            is_fast = _looks_fast(home, node, with_cpus)
        if is_fast:
            candidates.append((distance, node.index))
    return min(candidates)[1] if candidates else None


def _looks_fast(home: MemoryNode, node: MemoryNode, with_cpus: list[MemoryNode]) -> bool:
    """By size and distance alone, where the system says nothing."""
    to_others = [home.distances[other.index] for other in with_cpus if other.index != home.index]
    near = home.distances[node.index] < min(to_others, default=_FARTHEST_UNSTATED + 1)
    return near and node.memory_bytes <= home.memory_bytes


def _stated_fast(root: Path, home: int, node: int) -> bool | None:
    """Whether the system says that a core-less node is fast; ``None`` where it says nothing."""
    if node in (read_cpus(under(root, f"{_NODE}/has_generic_initiator")) or ()):
        return False
    tiers = _tiers(root)
    if home in tiers and node in tiers and tiers[home] != tiers[node]:
        return tiers[node] < tiers[home]
    bandwidths = _read_bandwidth(root, home), _read_bandwidth(root, node)
    if bandwidths[0] and bandwidths[1]:
        return bandwidths[1] > bandwidths[0]
    if node in _dax_targets(root):
        return False
    if _is_xeon_phi(root):
        return True
    normal = read_cpus(under(root, f"{_NODE}/has_normal_memory"))
    return False if normal and node not in normal else None


def _tiers(root: Path) -> dict[int, int]:
    """The memory tier of each node; the kernel gives faster memory a lower number."""
    folder = under(root, _TIERS)
    return {
        node: tier
        for tier in numbered_entries(folder, "memory_tier")
        for node in read_cpus(f"{folder}/memory_tier{tier}/nodelist") or ()
    }


def _read_bandwidth(root: Path, node: int) -> int | None:
    """MB/s that firmware (the HMAT) promises to the node's nearest initiator."""
    # access1 counts processors only; access0 also counts devices and is all that older kernels have.
    for access in ("access1", "access0"):
        path = under(root, f"{_NODE}/node{node}/{access}/initiators/read_bandwidth")
        if bandwidth := read_number(path):
            return bandwidth
    return None


def _dax_targets(root: Path) -> set[int]:
    folder = Path(under(root, "/sys/bus/dax/devices"))
    try:
        devices = list(folder.iterdir())
    except OSError:
        return set()
    return {target for device in devices if (target := read_number(f"{device}/target_node")) is not None}


def _is_xeon_phi(root: Path) -> bool:
    # Knights Landing and Knights Mill, by number, as early ones do not have the name.
    cpuinfo = (read(under(root, "/proc/cpuinfo")) or "")[:4096]
    return bool(
        re.search(r"^vendor_id\s*: GenuineIntel$", cpuinfo, re.MULTILINE)
        and re.search(r"^cpu family\s*: 6$", cpuinfo, re.MULTILINE)
        and re.search(r"^model\s*: (87|133)$", cpuinfo, re.MULTILINE)
    )
