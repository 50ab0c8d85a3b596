"""Divides this host's cores and memory nodes among its ranks, and binds each rank to its own.

The rules, by priority:

1. Every usable core goes to exactly one rank, and ranks differ by at most one core: ranks that work in
   step wait for the slowest.
2. If there are performance and efficiency cores, each rank gets the same mix, for the same reason: of 10 and
   10 cores, 2 ranks get 5 and 5 each. To use no efficiency cores, give a core list of the others.
3. A rank's cores come from as few memory nodes as possible. So 3 ranks on 2 nodes of 4 cores get 3, 3 and 2
   (rule 1), and exactly one of them has cores of both nodes. The nodes of a rank that needs several are in
   the same package if possible, else near each other.
4. A core's hardware threads belong to one rank: only the first, or all of them. A core list says exactly
   which threads are used.

Memory is bound to the memory nodes of the cores, as far as this process may use them.

Ranks are bound by system call; no ``numactl`` is needed. The kernel keeps both over ``exec`` and children
inherit them, so the launcher sets them in the forked child, before the rank's interpreter starts. C functions
are looked up at import, before the fork.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from acclimate.errors import BindingError, TopologyError, excerpt
from acclimate.host.topology import (
    LIVE,
    Core,
    MemoryNode,
    Topology,
    fast_memory_near,
    format_cpu_list,
    parse_cpu_list,
)
from acclimate.launch.binding.numa_groups import Counts, NodeGroup, group_nodes

UNBOUND_ADVICE = ", or leave out --bind_cores_to_rank"
"""The end of an error message if the ranks could run without binding."""

# Without OMP_PLACES: of these places, OpenMP uses only those that the process is bound to.
_PINNING_VARIABLES = {
    # Intel's and LLVM's OpenMP; a user's report: https://github.com/pytorch/pytorch/issues/8126
    "KMP_AFFINITY": (
        "OpenMP then pins a rank's first thread to one core, which everything that the rank starts later"
        " (data loaders, other threads) must share"
    ),
    # GNU's OpenMP, which torch ships. It ignores the affinity of the process.
    "GOMP_CPU_AFFINITY": (
        "OpenMP then moves the threads of every rank to these same cores, away from the rank's own"
    ),
}


@dataclass(frozen=True)
class RankBinding:
    """The cores and memory of one rank."""

    cpus: tuple[int, ...]
    """Its hardware threads, ascending."""
    cores: int
    """The number of physical cores among them."""
    memory_nodes: tuple[int, ...]
    """The nodes that its memory is bound to; empty: the kernel's policy is unchanged."""
    preferred_memory_node: int | None
    """A fast node without cores (HBM in flat mode) to prefer instead of binding; ``None``: none."""

    def describe(self) -> str:
        """Returns its processors and memory as text: ``processors 0-3, memory node 0``."""
        words = f"processors {format_cpu_list(self.cpus)}"
        if self.preferred_memory_node is not None:
            return f"{words}, memory node {self.preferred_memory_node} preferred"
        return f"{words}, memory node {format_cpu_list(self.memory_nodes)}" if self.memory_nodes else words


def bind_ranks(
    topology: Topology,
    ranks: int,
    *,
    core_list: str | None = None,
    use_hyperthreads: bool = False,
    root: Path = LIVE,
) -> tuple[RankBinding, ...]:
    """Divides the cores that this process may use among ``ranks``, by the rules at the top of this module.

    Args:
        topology: this machine's topology.
        ranks: the number of ranks; the result lists them in the order of their memory nodes.
        core_list: the hardware threads to use, instead of those that the process may use.
        use_hyperthreads: without a core list, use all threads of each core instead of one.
        root: the folder under which ``topology`` was read.

    Raises:
        BindingError: there are fewer cores than ranks, or the core list is malformed, descends, overlaps, or
            names processors that do not exist or are not allowed.
        TopologyError: a file of the kernel is corrupt.
    """
    if ranks < 1:
        raise BindingError(f"cores cannot be divided among {ranks} ranks; ask for at least 1")
    if core_list is not None:
        topology = replace(topology, allowed_cpus=frozenset(_listed_cpus(topology, core_list)))
    cores = topology.usable_cores()
    if core_list is None and not use_hyperthreads:
        cores = tuple(replace(core, cpus=core.cpus[:1]) for core in cores)
    if len(cores) < ranks:
        raise BindingError(_too_few(topology, cores, ranks, core_list))
    fast = {index: fast_memory_near(topology, index, root) for index in {core.node for core in cores}}
    shared = _share(topology, cores, ranks)
    shared.sort(key=lambda own: (min(core.node for core in own), min(core.cpus[0] for core in own)))
    return tuple(
        RankBinding(
            cpus=tuple(sorted(cpu for core in own for cpu in core.cpus)),
            cores=len(own),
            memory_nodes=_memory_nodes(topology, own) if preferred is None else (),
            preferred_memory_node=preferred,
        )
        for own in shared
        for preferred in [_preferred_node(own, fast)]
    )


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuses variables with which OpenMP would override the binding.

    Raises:
        BindingError: ``KMP_AFFINITY`` or ``GOMP_CPU_AFFINITY`` is set and not empty.
    """
    for name, effect in _PINNING_VARIABLES.items():
        if value := environ.get(name):
            raise BindingError(
                f'{name} is "{excerpt(value)}", which overrides the binding: {effect}; unset it (unset '
                f"{name}){UNBOUND_ADVICE}"
            )


# -- the usable cores ------------------------------------------------------------------------------


def _listed_cpus(topology: Topology, core_list: str) -> tuple[int, ...]:
    try:
        cpus = parse_cpu_list(core_list)
    except TopologyError as error:
        raise BindingError(f"--bind_core_list: {error}") from error
    if not cpus:
        raise BindingError('--bind_core_list is empty; list cores, as in "0-51,56-107"')
    ascending = format_cpu_list(cpus)
    if list(cpus) != sorted(cpus):
        # Refused: a user who writes an unordered list may expect that its order assigns cores to ranks.
        raise BindingError(
            f'--bind_core_list "{excerpt(core_list)}" descends; write it as "{ascending}" (the order has no '
            "effect: ranks get cores by memory node)"
        )
    if missing := set(cpus) - topology.online_cpus:
        raise BindingError(
            f"--bind_core_list names {format_cpu_list(missing)}, which this machine does not have or has"
            f" offline; online are {format_cpu_list(topology.online_cpus)}"
        )
    if forbidden := set(cpus) - topology.allowed_cpus:
        raise BindingError(
            f"--bind_core_list names {format_cpu_list(forbidden)}, which this process may not use; its"
            f" affinity or control group allows {format_cpu_list(topology.allowed_cpus)}"
        )
    return cpus


def _too_few(topology: Topology, cores: Sequence[Core], ranks: int, core_list: str | None) -> str:
    whose = "this process may use" if core_list is None else f'--bind_core_list "{excerpt(core_list)}" names'
    threads = ""
    if len(topology.allowed_cpus) > len(cores):
        threads = " (hardware threads of one core stay together)"
    return (
        f"{ranks} ranks need at least {ranks} cores, and {whose} {len(cores)}: processors"
        f" {format_cpu_list(topology.allowed_cpus)}{threads}; start at most {len(cores)}"
        f" (--num_accelerators {len(cores)}){UNBOUND_ADVICE}"
    )


# -- sharing them ----------------------------------------------------------------------------------


def _share(topology: Topology, cores: Sequence[Core], ranks: int) -> list[list[Core]]:
    """Returns the cores of each rank."""
    by_kind = _grouped(topology, [(core, (core.kind, 0)) for core in cores], ranks).share()
    if len({len(core.cpus) for core in cores}) == 1:
        return by_kind
    # Equal numbers of hardware threads are better, but not worth cores of several nodes.
    by_threads = _grouped(topology, [(core, (core.kind, len(core.cpus))) for core in cores], ranks).share()
    return min(
        by_threads, by_kind, key=lambda shared: sum(len({core.node for core in own}) for own in shared)
    )


@dataclass(frozen=True)
class _Sharing:
    """Groups of nodes, with the cores of each node by class."""

    groups: list[NodeGroup]
    cores: list[list[list[Core]]]

    def share(self) -> list[list[Core]]:
        shared: list[list[Core]] = []
        for group in self.groups:
            own: list[list[Core]] = [[] for _ in range(group.ranks)]
            first_with_one_more = 0
            for of_class in zip(*(self.cores[node] for node in group.nodes), strict=True):
                cores = [core for of_node in of_class for core in of_node]
                share, left = divmod(len(cores), group.ranks)
                # The remainder of a class goes to the ranks after those that got the previous remainder.
                favoured = {(first_with_one_more + n) % group.ranks for n in range(left)}
                first_with_one_more += left
                start = 0
                for rank in range(group.ranks):
                    end = start + share + (rank in favoured)
                    own[rank] += cores[start:end]
                    start = end
            shared += own
        return shared


def _grouped(topology: Topology, classed: Sequence[tuple[Core, tuple[str, int]]], ranks: int) -> _Sharing:
    """Groups nodes so that each rank gets its share of every class of cores."""
    # By package, then by number, so that a kernel without memory nodes does not mix packages.
    classed = sorted(classed, key=lambda item: (item[0].package, item[0].cpus))
    # Classes of one kind follow each other, so that their remainders are divided evenly too.
    classes = sorted({of_core for _, of_core in classed}, reverse=True)
    packages: dict[int, set[int]] = {}
    for core, _ in classed:
        packages.setdefault(core.node, set()).add(core.package)
    nodes = sorted((topology.node(index) for index in packages), key=lambda node: node.index)
    cores = [
        [
            [core for core, own in classed if own == core_class and core.node == node.index]
            for core_class in classes
        ]
        for node in nodes
    ]
    counts: list[Counts] = [
        (
            *map(len, of_node),
            *(sum(core.kind == kind for core in chain(*of_node)) for kind in ("performance", "efficiency")),
            sum(map(len, of_node)),
        )
        for of_node in cores
    ]

    def nearest(group: list[int], others: Iterable[int]) -> int:
        """Returns the next node for a group: in one of its packages if possible, else the nearest."""
        in_group = {package for member in group for package in packages[nodes[member].index]}

        def remoteness(other: int) -> tuple[bool, int, int]:
            index = nodes[other].index
            distance = sum(nodes[member].distances.get(index, 0) for member in group)
            return in_group.isdisjoint(packages[index]), distance, index

        return min(others, key=remoteness)

    return _Sharing(group_nodes(counts, ranks, nearest), cores)


# -- memory ----------------------------------------------------------------------------------------


def _memory_nodes(topology: Topology, cores: Iterable[Core]) -> tuple[int, ...]:
    """Returns the nodes of the cores, without those whose memory does not exist or is not allowed.

    If none is left, the policy stays unchanged: the kernel takes memory from the nearest node that has some.
    """
    homes = [topology.node(index) for index in {core.node for core in cores}]
    return tuple(sorted({node.index for home in homes for node in _local_memory(topology, home)}))


def _local_memory(topology: Topology, home: MemoryNode) -> list[MemoryNode]:
    """Returns a node, and nodes without cores that are as near to it as itself.

    These are slices of the same memory, which a kernel started with ``numa=fake=N`` has.
    """
    local = home.distances.get(home.index)
    return [
        node
        for node in topology.nodes
        if node.memory_bytes > 0
        and node.index in topology.allowed_memory_nodes
        and (
            node is home or (not node.cpus and local is not None and home.distances.get(node.index) == local)
        )
    ]


def _preferred_node(cores: Iterable[Core], fast: Mapping[int, int | None]) -> int | None:
    """Returns the fast memory node to prefer for a rank's cores, given that of each node with cores.

    ``None`` if the cores have different ones: the kernel can prefer only one, which is far from some cores.
    """
    near = {fast[core.node] for core in cores}
    return near.pop() if len(near) == 1 else None


# From the kernel's tables of system calls; glibc has no function of its own for this one. 64-bit only: a
# 32-bit process on the same kernel has other numbers.
_SET_MEMPOLICY = {
    "x86_64": 238,
    "aarch64": 237,
    "riscv64": 237,
    "loongarch64": 237,
    "ppc64": 261,
    "ppc64le": 261,
    "s390x": 270,
}
# include/uapi/linux/mempolicy.h
_PREFERRED, _BIND = 1, 2

_IS_LINUX = sys.platform.startswith("linux")
_IS_64_BIT = ctypes.sizeof(ctypes.c_void_p) == 8
_LIBC = ctypes.CDLL(None, use_errno=True) if _IS_LINUX else None
_CALL_NUMBER = _SET_MEMPOLICY.get(platform.machine()) if _IS_LINUX and _IS_64_BIT else None
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def apply_binding(binding: RankBinding) -> str | None:
    """Binds this process and the program that it will execute, as far as the system allows.

    Returns a message about the refused calls, else ``None``. The message is the same for every rank, so the
    launcher prints it once. Does not raise, since an unbound rank still works.
    """
    if not hasattr(os, "sched_setaffinity"):
        return f"ranks are not bound to cores: {platform.system()} does not let a process choose its cores"
    refused = []
    try:
        os.sched_setaffinity(0, binding.cpus)
    except (OSError, ValueError) as error:
        refused.append(f"ranks are not bound to cores: sched_setaffinity is refused ({_reason(error)})")
    try:
        if binding.preferred_memory_node is not None:
            _set_policy(_PREFERRED, [binding.preferred_memory_node])
        elif binding.memory_nodes:
            _set_policy(_BIND, binding.memory_nodes)
    except OSError as error:
        refused.append(f"memory is not bound to memory nodes: set_mempolicy is refused ({_reason(error)})")
    if not refused:
        return None
    remedy = "; containers need CAP_SYS_NICE for it (docker run --cap-add SYS_NICE)"
    return "; ".join(refused) + (remedy if "Operation not permitted" in refused[-1] else "")


def _set_policy(mode: int, nodes: Sequence[int]) -> None:
    """Sets the memory policy of this process; raises OSError if the kernel refuses."""
    if _LIBC is None or _CALL_NUMBER is None:
        raise OSError(errno.ENOSYS, f"not implemented for {platform.machine()}")
    words = max(nodes) // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    # The kernel subtracts one from the number of bits (get_nodes in mm/mempolicy.c).
    bits = ctypes.c_ulong(words * _WORD_BITS + 1)
    if _LIBC.syscall(ctypes.c_long(_CALL_NUMBER), ctypes.c_long(mode), mask, bits) == 0:
        return
    code = ctypes.get_errno()
    # A kernel without memory nodes has no such call, and all memory is equally near.
    if code != errno.ENOSYS or os.path.isdir("/sys/devices/system/node"):
        raise OSError(code, os.strerror(code))


def _reason(error: OSError | ValueError) -> str:
    return str(getattr(error, "strerror", None) or error)
