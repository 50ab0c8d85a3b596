"""The cores and memory nodes of a machine, and which of them this process may use.

Every function reads ``/sys`` and ``/proc`` under a root. The root is ``Path("/")`` by default; tests pass the
folder of a recorded machine. Nothing here runs a program or imports torch.
"""

from acclimate.host.topology.control_groups import cpu_quota
from acclimate.host.topology.coreless_memory import fast_memory_near
from acclimate.host.topology.cores import Core
from acclimate.host.topology.kernel_files import LIVE, format_cpu_list, parse_cpu_list
from acclimate.host.topology.limits import available_memory, memory_limit, total_memory
from acclimate.host.topology.machine import (
    MemoryNode,
    Topology,
    processor_limit,
    read_topology,
    usable_node_count,
)

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
    "processor_limit",
    "read_topology",
    "total_memory",
    "usable_node_count",
]
