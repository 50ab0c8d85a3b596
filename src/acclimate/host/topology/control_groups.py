"""The control groups of this process: of version 1, of version 2, or of both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from acclimate.host.topology.kernel_files import LIVE, read, read_cpus, under

# The current names in order of authority, then those of a cpuset mounted by itself (/dev/cpuset).
_CPUSET_FILES = {
    "cpus": ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus", "cpus"),
    "mems": ("cpuset.mems.effective", "cpuset.effective_mems", "cpuset.mems", "mems"),
}


def own_groups(root: Path, controller: str) -> list[list[str]]:
    """The folders of this process's groups that can hold a controller's files: a list per mounted hierarchy.

    Each list starts with the process's own group and ends with the root of the mount. Folders that do not
    exist are left out: a container may not see the path in ``/proc/self/cgroup``, and the root of its mount
    is then its own group.
    """
    mounts = list(_mounts(root))
    paths = _own_paths(root)
    # Where /proc/self/cgroup is absent, the path of the cpuset is that of the version 2 group, unless a
    # cpuset of version 1 is mounted.
    if "cpuset" in paths and not any(
        "cpuset" in controllers for _, is_v2, controllers in mounts if not is_v2
    ):
        paths.setdefault("", paths["cpuset"])
    chains = []
    for mount_point, is_v2, controllers in mounts:
        if not is_v2 and controller not in controllers:
            continue
        path = paths.get("" if is_v2 else controller, "/")
        names = [name for name in path.split("/") if name]
        if ".." in names:  # the process sits outside its own cgroup namespace: nothing there is visible
            names = []
        folders = (os.path.join(mount_point, *names[:depth]) for depth in range(len(names), -1, -1))
        if chain := [folder for folder in folders if os.path.isdir(folder)]:
            chains.append(chain)
    return chains


def cpuset(root: Path, kind: str) -> Iterator[frozenset[int]]:
    """The processors (``cpus``) or memory nodes (``mems``) that each mounted hierarchy allows this process.

    The nearest group with such a file counts, because the kernel keeps it within its ancestors.
    """
    for chain in own_groups(root, "cpuset"):
        found = (read_cpus(f"{folder}/{name}") for folder in chain for name in _CPUSET_FILES[kind])
        if numbers := next(filter(None, found), None):
            yield numbers


def cpu_quota(root: Path = LIVE) -> float | None:
    """The processor time that this process may use, in processors; ``None`` if it is unlimited.

    This is the smallest quota of the process's group and its ancestors (v2 ``cpu.max``, v1
    ``cpu.cfs_quota_us``). It may be a fraction, and larger than the number of processors. A file that cannot
    be parsed counts as no limit.
    """
    quotas = [
        quota
        for chain in own_groups(root, "cpu")
        for folder in chain
        if (quota := _quota_of(folder)) is not None
    ]
    return min(quotas, default=None)


def _quota_of(folder: str) -> float | None:
    text = read(f"{folder}/cpu.max")
    if text is None:
        text = f"{read(f'{folder}/cpu.cfs_quota_us') or ''} {read(f'{folder}/cpu.cfs_period_us') or ''}"
    numbers = text.split()
    # "max" (v2) and -1 (v1) mean no limit.
    if len(numbers) != 2 or not all(n.isdecimal() and len(n) < 19 and int(n) > 0 for n in numbers):
        return None
    return int(numbers[0]) / int(numbers[1])


def _own_paths(root: Path) -> dict[str, str]:
    """The path of this process's group by controller; the version 2 path under ``""``."""
    paths = {}
    for line in (read(under(root, "/proc/self/cgroup")) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths.update(dict.fromkeys(controllers.split(","), path))
    # Kernels without /proc/self/cgroup, and containers and recorded machines that leave it out.
    if "cpuset" not in paths and (path_of_cpuset := read(under(root, "/proc/self/cpuset"))):
        paths["cpuset"] = path_of_cpuset.strip()
    return paths


def _mounts(root: Path) -> Iterator[tuple[str, bool, set[str]]]:
    """Every mounted hierarchy: its folder, whether it is version 2, and the controllers of version 1."""
    for line in (read(under(root, "/proc/mounts")) or "").splitlines():
        fields = line.split(" ")
        if len(fields) < 4 or fields[2] not in ("cgroup", "cgroup2", "cpuset"):
            continue
        mount_point = under(root, fields[1].replace("\\040", " "))
        yield mount_point, fields[2] == "cgroup2", {fields[2], *fields[3].split(",")}
