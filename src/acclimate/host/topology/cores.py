"""The physical cores of a machine: their hardware threads, packages and kinds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from acclimate.host.topology.kernel_files import read, read_cpus, read_number, under

_CPU = "/sys/devices/system/cpu"

# Cores of one kind differ by a few percent (binning, favoured turbo cores): 731 and 718, 1024 and 997
# on a GB10. Efficiency cores reach 0.45 to 0.75 of a performance core's capacity or frequency.
_EFFICIENCY_BELOW = 0.8

_CPUINFO_LINE = re.compile(
    r"^(processor|physical id|core id|siblings|cpu cores)\s*:\s*([0-9]{1,9})\s*$", re.MULTILINE
)


@dataclass(frozen=True)
class Core:
    """One physical core.

    ``cpus`` are its online hardware threads, ascending. ``package`` is its socket, -1 where unknown,
    ``node`` its memory node. ``capacity`` compares cores of this machine only: the kernel's scale,
    where the fastest core has 1024, or else the firmware's scale of performance (ACPI CPPC), or else the
    highest frequency in kHz; 0 where none is known. ``kind`` is "efficiency" for the slower cores of a
    hybrid machine and "performance" for all others.
    """

    cpus: tuple[int, ...]
    package: int
    node: int
    capacity: int
    kind: Literal["performance", "efficiency"]


@dataclass(frozen=True)
class _Place:
    """The package and core of a processor, as far as the kernel reports them."""

    package: int | None
    core: tuple[int | None, ...] | None


def read_cores(root: Path, cpus_by_node: Mapping[int, tuple[int, ...]]) -> tuple[Core, ...]:
    """The cores of all nodes, by ascending first processor.

    Raises:
        TopologyError: a file is there but corrupt.
    """
    online = frozenset(cpu for cpus in cpus_by_node.values() for cpu in cpus)
    places = _places(root, online)
    found = [(cpus, node) for node, own in cpus_by_node.items() for cpus in _cores_of(root, own, places)]
    capacities = _capacities(root, [cpus[0] for cpus, _ in found])
    declared = _performance_cpus(root, online)
    enough = _EFFICIENCY_BELOW * max(capacities.values())
    cores = []
    for cpus, node in sorted(found):
        fast = cpus[0] in declared if declared is not None else capacities[cpus[0]] >= enough
        package = places[cpus[0]].package
        cores.append(
            Core(
                cpus=cpus,
                package=-1 if package is None else package,
                node=node,
                capacity=capacities[cpus[0]],
                kind="performance" if fast else "efficiency",
            )
        )
    return tuple(cores)


# -- hardware threads ------------------------------------------------------------------------------


def _cores_of(root: Path, cpus: Iterable[int], places: Mapping[int, _Place]) -> list[tuple[int, ...]]:
    """Returns the hardware threads of each core of a node.

    The kernel's thread siblings form one core, as in ``lscpu``. So do the two halves of an AMD compute unit,
    which have different core_ids but share a floating-point unit. A core_id is unique only within a node,
    because the two nodes of some packages use the same ones.
    """
    cores: dict[object, list[int]] = {}
    for cpu in cpus:
        cores.setdefault(_siblings(root, cpu) or places[cpu].core or cpu, []).append(cpu)
    return [tuple(threads) for threads in cores.values()]


def _siblings(root: Path, cpu: int) -> frozenset[int] | None:
    for name in ("core_cpus", "thread_siblings"):
        path = under(root, f"{_CPU}/cpu{cpu}/topology/{name}")
        if siblings := read_cpus(f"{path}_list", path):
            return siblings
    return None


def _places(root: Path, cpus: Iterable[int]) -> dict[int, _Place]:
    """The package and the core of each processor, from ``/sys`` or else from ``/proc/cpuinfo``."""
    places = {cpu: _place(root, cpu) for cpu in cpus}
    if any(place.package is None or place.core is None for place in places.values()):
        for cpu, place in _places_in_cpuinfo(read(under(root, "/proc/cpuinfo")) or "").items():
            # Both numbers come from one source, because the other source may number differently.
            if cpu in places and places[cpu] == _Place(None, None):
                places[cpu] = place
    return places


def _place(root: Path, cpu: int) -> _Place:
    path = under(root, f"{_CPU}/cpu{cpu}/topology")
    package = read_number(f"{path}/physical_package_id")
    core_id = read_number(f"{path}/core_id")
    if core_id is None or core_id < 0:
        return _Place(package, None)
    return _Place(package, (package, read_number(f"{path}/die_id"), core_id))


def _places_in_cpuinfo(text: str) -> dict[int, _Place]:
    """The package and the core that each block of ``/proc/cpuinfo`` gives."""
    places: dict[int, _Place] = {}
    processors: dict[tuple[int, int], int] = {}  # how many so far by package and core
    for block in re.split(r"\n\s*\n", text):
        number = {name: int(value) for name, value in _CPUINFO_LINE.findall(block)}
        if (cpu := number.get("processor")) is None:
            continue
        package, core = number.get("physical id"), number.get("core id")
        if package is None or core is None:
            places[cpu] = _Place(package, None)
            continue
        before = processors.get((package, core), 0)
        processors[package, core] = before + 1
        # Some virtual machines give all processors the same ids, and merged machines repeat them. No core has
        # more threads than siblings / cpu cores.
        threads = number.get("siblings", 0) // (number.get("cpu cores") or 1)
        places[cpu] = _Place(package, (package, core, before // threads if threads else 0))
    return places


# -- kinds -----------------------------------------------------------------------------------------


def _capacities(root: Path, cpus: list[int]) -> dict[int, int]:
    """Returns the speed of each processor, all from one kind of file; zeros if no kind covers them all.

    A kind of file with different values is preferred: older kernels report 1024 for each core of some hybrid
    machines, and Intel's Lakefield reports equal frequencies.
    """
    known: list[dict[int, int]] = []
    for name in ("cpu_capacity", "acpi_cppc/highest_perf", "cpufreq/cpuinfo_max_freq"):
        values = _values(root, cpus, name)
        if values is None or max(values.values()) <= 0:
            continue
        # AMD's highest_perf differs between equal cores, as a hint for the scheduler; nominal_perf does not.
        if name == "acpi_cppc/highest_perf":
            nominal = _values(root, cpus, "acpi_cppc/nominal_perf")
            if nominal is not None and not _differ(nominal):
                continue
        known.append(values)
    if not known:
        return dict.fromkeys(cpus, 0)
    return next(filter(_differ, known), known[0])


def _values(root: Path, cpus: Iterable[int], name: str) -> dict[int, int] | None:
    values: dict[int, int] = {}
    for cpu in cpus:
        value = read_number(under(root, f"{_CPU}/cpu{cpu}/{name}"))
        if value is None:
            return None
        values[cpu] = value
    return values


def _differ(values: Mapping[int, int]) -> bool:
    """Whether the values show more than one kind of core."""
    return min(values.values()) < _EFFICIENCY_BELOW * max(values.values())


def _performance_cpus(root: Path, online: frozenset[int]) -> frozenset[int] | None:
    """The performance cores that Intel's hybrid processors declare; ``None`` on all other machines."""
    fast = read_cpus(under(root, "/sys/devices/cpu_core/cpus"))
    slow = read_cpus(under(root, "/sys/devices/cpu_atom/cpus"))
    if fast:
        return fast
    return online - slow if slow else None
