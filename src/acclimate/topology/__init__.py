"""Cores, memory nodes, and what this process may use of them.

Everything is read from ``/sys`` and ``/proc`` under a root, ``Path("/")`` unless another is given, so
that a recorded machine can stand in for the running one. No program is run and torch is not imported.
"""

from acclimate.topology.control_groups import cpu_quota
from acclimate.topology.coreless_memory import fast_memory_near
from acclimate.topology.cores import Core
from acclimate.topology.kernel_files import LIVE, format_cpu_list, parse_cpu_list
from acclimate.topology.limits import available_memory, memory_limit, total_memory
from acclimate.topology.machine import MemoryNode, Topology, read_topology, usable_node_count

__all__ = [
    "LIVE",
    "Core",
    "MemoryNode",
    "Topology",
    "available_memory",
    "cpu_quota",
    "fast_memory_near",
    "format_cpu_list",
    "memory_limit",
    "parse_cpu_list",
    "read_topology",
    "total_memory",
    "usable_node_count",
]
