"""The ranks of one host: how many, on which devices, with which cores and variables."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from pathlib import Path

from acclimate.backends import Backend
from acclimate.errors import (
    AcceleratorUnavailableError,
    InvalidBackendError,
    LaunchOptionError,
    UnknownAcceleratorError,
)
from acclimate.launch.binding.cores import RankBinding, bind_ranks, check_environment
from acclimate.launch.plan.environment import Place, rank_environment
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.plan.rank_plan import RankPlan
from acclimate.selection import find_backends, requested
from acclimate.topology import Topology, cpu_quota, read_topology

_logger = logging.getLogger("acclimate")


def find_accelerator() -> Backend | None:
    """The accelerator that ranks here will most likely use, told without importing torch.

    The one that ``DS_ACCELERATOR`` or ``ACCLIMATE_ACCELERATOR`` names; else the first in the order of
    detection whose software is installed and whose devices are here. ``None`` for one that only torch knows.

    Raises:
        ConflictingChoiceError: the two variables differ.
    """
    records, _ = find_backends()
    request = requested()
    if request is not None:
        named = [record for record in records if record.name == request[1]]
        # Of several ways to the same accelerator, the one whose software is here.
        alone = len(named) == 1
        return next((record for record in named if alone or record.is_installed()), next(iter(named), None))
    usable = [record for record in records if record.auto_detect and _is_here(record)]
    names = {record.name for record in usable}
    return next(record for record in usable if names.isdisjoint(record.yields_to))


def _is_here(record: Backend) -> bool:
    """Whether ranks can use an accelerator here; not one whose plug-in fails to tell what a launch needs."""
    if record.is_fallback:
        return True
    try:
        record.visible_devices_variable()
        return record.is_installed() and record.device_count() > 0
    except InvalidBackendError as error:
        _logger.warning("The %s accelerator is not used: %s", record.name, error)
        return False


def count_local_ranks(accelerator: Backend | None) -> int:
    """How many ranks one host runs where nothing says so: one for each device.

    On CPU a device is a memory node with cores that this process may use.

    Raises:
        UnknownAcceleratorError: no accelerator of that name is known before torch is imported.
        AcceleratorUnavailableError: it was asked for by name, and there is no device of it.
    """
    request = requested()
    if accelerator is None:
        variable, name = request or ("DS_ACCELERATOR", "")
        broken = find_backends()[1]
        if name in broken:
            raise AcceleratorUnavailableError(f'{variable} is "{name}", whose plug-in failed: {broken[name]}')
        raise UnknownAcceleratorError(_unknown(variable, name))
    count = accelerator.device_count()
    if count > 0:
        return count
    variable = request[0] if request is not None else "DS_ACCELERATOR"
    raise AcceleratorUnavailableError(
        f'{variable} is "{accelerator.name}", but this host has no device of it that this process may use. '
        f"Unset {variable} to detect what is here, or say how many ranks to start with --num_accelerators."
    )


def _unknown(variable: str, name: str) -> str:
    known = list(dict.fromkeys(record.name for record in find_backends()[0]))
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    return (
        f'{variable} is "{name}", which is none of {known}.{hint} Devices that only torch knows cannot be '
        "counted without it: say how many ranks to start with --num_accelerators."
    )


def plan_ranks(job: JobPlan, node_rank: int, environ: Mapping[str, str]) -> tuple[RankPlan, ...]:
    """What the supervisor of one host starts; also what a slot takes its own rank from, by local rank.

    Args:
        job: with its master address and port.
        node_rank: of this host.
        environ: the variables of this host that ranks inherit; the job's are laid over them.

    Raises:
        BindingError: the cores cannot be shared as asked for.
        LaunchOptionError: the master's address or port is open, or a slot has no device.
    """
    if job.master_addr is None or job.master_port is None:
        raise LaunchOptionError(
            "The address and port of the master are needed before ranks can be planned: give --master_addr "
            "and --master_port."
        )
    inherited = {**environ, **job.environment}
    slots = job.hosts[node_rank].slots
    topology = read_topology()
    bindings = _bindings(job, topology, inherited, len(slots))
    devices = _visible_devices(job, slots, inherited)
    plans = []
    for local_rank, binding in enumerate(bindings):
        rank = job.rank_offset(node_rank) + local_rank
        place = Place(
            rank, local_rank, job.world_size, len(slots), node_rank, job.master_addr, job.master_port
        )
        threads = _threads(job, topology, binding, len(slots))
        plans.append(
            RankPlan(
                rank=rank,
                local_rank=local_rank,
                command=(*job.command, *([f"--local_rank={local_rank}"] if job.local_rank_arg else [])),
                environment=rank_environment(inherited, place, threads=threads, devices=devices),
                binding=binding,
                log_path=Path(job.log_dir, f"rank_{rank}.log") if job.log_dir is not None else None,
            )
        )
    return tuple(plans)


def _bindings(
    job: JobPlan, topology: Topology, environ: Mapping[str, str], ranks: int
) -> tuple[RankBinding | None, ...]:
    if not job.bind_cores:
        return (None,) * ranks
    check_environment(environ)
    return bind_ranks(topology, ranks, core_list=job.core_list, use_hyperthreads=job.use_hyperthreads)


def _threads(job: JobPlan, topology: Topology, binding: RankBinding | None, ranks: int) -> int:
    """The cores of one rank; an equal share of what this process has where none are bound."""
    if binding is not None:
        # A core list that names both threads of a core wants both used.
        counts_threads = job.use_hyperthreads or job.core_list is not None
        return len(binding.cpus) if counts_threads else binding.cores
    cores = len(topology.usable_cores())
    quota = cpu_quota()
    return max(1, (cores if quota is None else min(cores, int(quota))) // ranks)


def _visible_devices(job: JobPlan, slots: tuple[int, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """The same for all ranks of a host, as torchrun has it: a local rank is a place in the list."""
    records, _ = find_backends()
    variable = next(
        (record.visible_devices_variable() for record in records if record.name == job.accelerator), None
    )
    if variable is None:
        return {}
    already = [entry.strip() for entry in environ.get(variable, "").split(",") if entry.strip()]
    if not already:
        return {variable: ",".join(map(str, slots))}
    if slots[-1] >= len(already):
        raise LaunchOptionError(
            f"Slot {slots[-1]} has no device: {variable} names {len(already)}. Ask for fewer slots, or let "
            "the variable name more devices."
        )
    return {variable: ",".join(already[slot] for slot in slots)}
