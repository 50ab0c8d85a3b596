"""How much memory this process may use: that of the host, or less if a control group limits it."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from acclimate.errors import TopologyError
from acclimate.host.topology.control_groups import own_groups
from acclimate.host.topology.kernel_files import LIVE, read, read_number, under

# Version 1 says "no limit" with the largest number of whole pages, 2**63 less one page.
_NO_LIMIT = 1 << 62


class _Group(NamedTuple):
    """The files of one control group that limits memory."""

    limits: tuple[str, ...]
    usage: str
    stat: str
    reclaimable: str  # the line of `stat` that counts page cache the kernel gives back first
    inherited: str | None  # the line of `stat` with the tightest limit of ancestors that are not visible here


def total_memory(root: Path = LIVE) -> int:
    """Returns the bytes of memory that this process can use: the host's, or a control group's lower limit.

    Raises:
        TopologyError: the system's files on memory are corrupt, or ``root`` has none.
    """
    limit = memory_limit(root)
    host = _host_memory(root)[0]
    return host if limit is None else min(host, limit)


def available_memory(root: Path = LIVE) -> int:
    """The memory that this process can still take without swapping, in bytes.

    This is the smallest amount left in the host and in each of the process's control groups. Page cache that
    the kernel can free on demand counts as available.

    Raises:
        TopologyError: the system's files on memory are corrupt, or ``root`` has none.
    """
    available = _host_memory(root)[1]
    for group in _groups(root):
        if (limit := _limit_of(group)) is not None:
            usage = read_number(group.usage) or 0
            reclaimable = _number_in(read(group.stat), group.reclaimable) or 0
            available = min(available, limit - usage + min(reclaimable, usage))
    return max(0, available)


def memory_limit(root: Path = LIVE) -> int | None:
    """The smallest memory limit of this process's control groups, in bytes; ``None`` if there is no limit.

    Limits are ``memory.limit_in_bytes`` of version 1, and ``memory.max`` and ``memory.high`` of version 2, of
    the process's own group and all ancestors. Beyond ``memory.high`` the kernel slows a process down a lot.

    Raises:
        TopologyError: a limit is neither a number nor ``max``.
    """
    limits = [limit for group in _groups(root) if (limit := _limit_of(group)) is not None]
    return min(limits, default=None)


def _limit_of(group: _Group) -> int | None:
    limits = [_limit_in(path) for path in group.limits]
    if group.inherited:
        limits.append(_number_in(read(group.stat), group.inherited))
    return min((limit for limit in limits if limit is not None and limit < _NO_LIMIT), default=None)


def _limit_in(path: str) -> int | None:
    text = (read(path) or "max").strip()
    if text == "max":
        return None
    if not (text.isdecimal() and len(text) <= 20):
        raise TopologyError(f'{path} holds "{text[:80]}", but must hold a number of bytes or "max"')
    return int(text)


def _groups(root: Path) -> tuple[_Group, ...]:
    # Cached, because finding the groups takes longer than reading them. They change only if the process moves
    # to another group, which changes its line in this file.
    return _groups_of(root, read(under(root, "/proc/self/cgroup")))


@lru_cache(maxsize=32)
def _groups_of(root: Path, own_cgroup: str | None) -> tuple[_Group, ...]:
    groups = []
    for chain in own_groups(root, "memory"):
        for folder in chain:
            path = f"{folder}/{{}}".format
            if os.path.exists(path("memory.max")) or os.path.exists(path("memory.high")):
                limits = (path("memory.max"), path("memory.high"))
                groups.append(
                    _Group(limits, path("memory.current"), path("memory.stat"), "inactive_file", None)
                )
            elif os.path.exists(path("memory.limit_in_bytes")):
                is_own = folder == chain[0]
                # Without use_hierarchy an ancestor's limit binds only its own processes.
                if is_own or read_number(path("memory.use_hierarchy")) != 0:
                    groups.append(
                        _Group(
                            (path("memory.limit_in_bytes"),),
                            path("memory.usage_in_bytes"),
                            path("memory.stat"),
                            "total_inactive_file",
                            "hierarchical_memory_limit" if is_own else None,
                        )
                    )
    return tuple(groups)


def _host_memory(root: Path) -> tuple[int, int]:
    """Bytes of memory in the machine, and how many of them are available."""
    meminfo = read(under(root, "/proc/meminfo"))
    if meminfo is None:
        if root != LIVE:
            raise TopologyError(
                f"{under(root, '/proc/meminfo')} is missing, so the memory under it is unknown"
            )
        # Not Linux, or /proc is hidden. Imported here, as most machines never need it.
        import psutil

        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available)
    total = _number_in(meminfo, "MemTotal")
    if total is None:
        raise TopologyError(
            f"{under(root, '/proc/meminfo')} does not say how much memory there is (MemTotal)"
        )
    available = _number_in(meminfo, "MemAvailable")
    if available is None:  # kernels before 3.14; this is what their free(1) showed
        available = sum(_number_in(meminfo, name) or 0 for name in ("MemFree", "Buffers", "Cached"))
    return total, min(total, available)


def _number_in(text: str | None, name: str) -> int | None:
    """The bytes that a line such as ``MemTotal:  8192 kB`` or ``inactive_file 8192`` gives."""
    match = re.search(rf"^{name}:?[ \t]+([0-9]{{1,20}})( kB)?\s*$", text or "", re.ASCII | re.MULTILINE)
    if match is None:
        return None
    return int(match[1]) * (1024 if match[2] else 1)
