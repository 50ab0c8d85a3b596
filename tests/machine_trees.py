"""Roots that stand in for a machine's ``/sys`` and ``/proc``: recorded ones, and ones made file by file."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from acclimate.host.topology import format_cpu_list, parse_cpu_list

RECORDED = Path(__file__).parents[1].parent / "shared" / "numa"
GIB = 1 << 30


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Unpacks a recorded machine and gives the root to read it from."""
    folder = tmp_path_factory.mktemp("numa")

    def unpack(name: str) -> Path:
        archive = RECORDED / f"{name}.tar.gz"
        if not archive.exists():
            pytest.skip("the recorded machines (../shared/numa) are not beside this checkout")
        if not (folder / name).exists():
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
        return folder / name

    return unpack


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return root


def machine(
    nodes: Mapping[int, tuple[str, float]],
    distances: list[str] | None = None,
    siblings: Mapping[int, str] | None = None,
    **more: str,
) -> dict[str, str]:
    """Files of a machine with ``{node: (cpulist, GiB)}``; ``more`` are further files, by path."""
    cpus = [cpu for text, _ in nodes.values() for cpu in parse_cpu_list(text)]
    files = {
        "sys/devices/system/cpu/online": format_cpu_list(cpus),
        "sys/devices/system/node/online": format_cpu_list(nodes),
    }
    for row, (node, (cpulist, gib)) in enumerate(nodes.items()):
        folder = f"sys/devices/system/node/node{node}"
        files[f"{folder}/cpulist"] = cpulist
        files[f"{folder}/meminfo"] = f"Node {node} MemTotal:  {int(gib * GIB) // 1024} kB"
        if distances:
            files[f"{folder}/distance"] = distances[row]
    for cpu in cpus:
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{folder}/thread_siblings_list"] = (siblings or {}).get(cpu, str(cpu))
        files[f"{folder}/physical_package_id"] = "0"
    return files | more


def access_classes(
    bandwidths: Mapping[int, tuple[int, Sequence[int]]], access: str = "access1"
) -> dict[str, str]:
    """Files of the firmware's figures with ``{node: (MB/s, the nodes whose processors get them)}``."""
    files = {}
    for node, (mb_s, initiators) in bandwidths.items():
        folder = f"sys/devices/system/node/node{node}/{access}/initiators"
        files[f"{folder}/read_bandwidth"] = str(mb_s)
        files |= {f"{folder}/node{initiator}": "" for initiator in initiators}  # links, on a real machine
    return files


def cgroup_files(mounts: str, own: str, **more: str) -> dict[str, str]:
    return {"proc/mounts": mounts, "proc/self/cgroup": own, "proc/meminfo": MEMINFO, **more}


MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB"
V2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,nodev,noexec,relatime,nsdelegate 0 0"
V1 = "\n".join(
    f"cgroup /sys/fs/cgroup/{name} cgroup rw,nosuid,relatime,{name} 0 0"
    for name in ("memory", "cpu,cpuacct", "cpuset")
)


# Machines with memory that has no cores, for machine(): {node: (cpulist, GiB)}, and their distances.
XEON_MAX = {0: ("0-55", 256), 1: ("56-111", 256), 2: ("", 64), 3: ("", 64)}
XEON_MAX_DISTANCES = ["10 21 13 23", "21 10 23 13", "13 23 10 23", "23 13 23 10"]
XEON_MAX_BANDWIDTHS = access_classes(
    {0: (300_000, [0]), 1: (300_000, [1]), 2: (800_000, [0]), 3: (800_000, [1])}
)
KNL = {0: ("0-63", 96), 1: ("", 16)}
KNL_CPUINFO = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 87\nmodel name\t: 0000"
GRACE_HOPPER = {0: ("0-71", 480), 1: ("", 96)} | dict.fromkeys(range(2, 9), ("", 0))
GRACE_HOPPER_DISTANCES = ["10" + " 80" * 8] + [
    " ".join("10" if n == m else "80" for m in range(9)) for n in range(1, 9)
]
