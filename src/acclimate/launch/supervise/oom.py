"""Whether the kernel's out-of-memory killer is the likely sender of a SIGKILL."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from acclimate.host.topology.control_groups import own_groups
from acclimate.host.topology.kernel_files import LIVE, read, under


@dataclass(frozen=True)
class KillCount:
    """How many processes the kernel has killed for lack of memory so far; ``None`` if unknown."""

    group: int | None
    """In this process's control group and those below."""
    host: int | None
    """On the whole host, including other users'."""


def count_kills(root: Path = LIVE) -> KillCount:
    """Reads the kernel's counters."""
    found = [
        count
        for chain in own_groups(root, "memory")
        # Version 2, and version 1 since Linux 4.13.
        for name in ("memory.events", "memory.oom_control")
        if (count := _counter(f"{chain[0]}/{name}")) is not None
    ]
    return KillCount(max(found, default=None), _counter(under(root, "/proc/vmstat")))


def _counter(path: str) -> int | None:
    for line in (read(path) or "").splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip().isdecimal():
            return int(number)
    return None


def _other_senders() -> str:
    # The ranks have the launcher's limits. At the soft one the kernel sends SIGXCPU, at the hard one SIGKILL.
    if resource.getrlimit(resource.RLIMIT_CPU)[1] == resource.RLIM_INFINITY:
        return "another process"
    return "another process, or the kernel at the time limit (ulimit -t),"


def explain_sigkill(before: KillCount, after: KillCount) -> str | None:
    """Returns a sentence on the sender of a SIGKILL between two readings; ``None`` if unknown."""
    for start, end, place in (
        (before.group, after.group, "of this control group"),
        (before.host, after.host, "on this host"),
    ):
        if start is None or end is None:
            continue
        if end > start:
            count = "a process" if end == start + 1 else f"{end - start} processes"
            return (
                f"The kernel's out-of-memory killer is the likely cause: it killed {count} {place} "
                "meanwhile. Give the job more memory, or let each rank use less."
            )
        # The group's own counter is more reliable: the host's also counts other containers.
        return f"The kernel's out-of-memory killer did not act, so {_other_senders()} sent the signal."
    return None
