"""A job, and the ranks of each of its hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from acclimate.errors import LaunchOptionError
from acclimate.launch.binding.cores import RankBinding, bind_ranks, check_environment
from acclimate.launch.plan.agent_options import AgentOptions
from acclimate.launch.plan.devices import visible_devices
from acclimate.launch.plan.environment import RankPlace, rank_environment
from acclimate.launch.plan.hostfile import HostPlan
from acclimate.topology import Topology, cpu_quota, read_topology


@dataclass(frozen=True)
class JobPlan(AgentOptions):
    """The plan of a job, made by the launcher and read by all processes that start ranks.

    Without ``master_addr`` and ``master_port``, ranks meet at the first host's address and a free port of it.
    """

    hosts: tuple[HostPlan, ...]
    """In the order of node ranks."""
    command: tuple[str, ...]
    """The command of each rank, including the interpreter."""
    environment: Mapping[str, str]
    """The launcher's variables that are exported to ranks on other hosts."""
    directory: str
    """The ranks' working directory."""
    accelerator: str
    """The name of the accelerator's record, whose visible-devices variable assigns the slots."""

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return sum(len(host.slots) for host in self.hosts)

    def rank_offset(self, node_rank: int) -> int:
        """Returns the rank of a host's first slot."""
        return sum(len(host.slots) for host in self.hosts[:node_rank])


@dataclass(frozen=True)
class RankPlan:
    """The plan of one rank, for the supervisor."""

    rank: int
    local_rank: int
    command: tuple[str, ...]
    """Program and arguments; the program is looked up in the environment's ``PATH``."""
    environment: Mapping[str, str]
    """The whole environment; nothing else is inherited."""
    binding: RankBinding | None = None
    """Its cores and memory nodes; ``None``: as the launcher."""
    log_path: Path | None = None
    """A file to which the rank's output is also appended."""


def plan_ranks(job: JobPlan, node_rank: int, environ: Mapping[str, str]) -> tuple[RankPlan, ...]:
    """Returns the ranks of one host, by local rank.

    Args:
        job: the job, with its master address and port.
        node_rank: this host's.
        environ: this host's variables, which ranks inherit; the job's take precedence.

    Raises:
        BindingError: the cores cannot be divided as the job asks.
        LaunchOptionError: the master's address or port is missing, or a slot has no device.
    """
    if job.master_addr is None or job.master_port is None:
        raise LaunchOptionError(
            "Ranks cannot be planned without the address and port of the master: give --master_addr and "
            "--master_port."
        )
    inherited = {**environ, **job.environment}
    slots = job.hosts[node_rank].slots
    topology = read_topology()
    bindings: Sequence[RankBinding | None] = (None,) * len(slots)
    if job.binds:
        bindings = bind_host(job, node_rank, topology, inherited)
    share = max(1, len(topology.usable_cores()) // len(slots))
    quota = cpu_quota()
    most = None if quota is None else max(1, int(quota / len(slots)))
    devices = visible_devices(job.accelerator, slots, inherited)
    first_rank, world_size = job.rank_offset(node_rank), job.world_size
    plans = []
    for local_rank, binding in enumerate(bindings):
        rank = first_rank + local_rank
        place = RankPlace(
            rank, local_rank, world_size, len(slots), node_rank, job.master_addr, job.master_port
        )
        threads = share if binding is None else _threads(job, binding)
        if most is not None:  # more threads than that would only wait for each other's time
            threads = min(threads, most)
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


def bind_host(
    job: JobPlan, node_rank: int, topology: Topology, environ: Mapping[str, str]
) -> tuple[RankBinding, ...]:
    """Returns the binding of each rank of one host.

    Raises:
        BindingError: the cores cannot be divided as the job asks, or a variable overrides the binding.
    """
    check_environment(environ)
    ranks = len(job.hosts[node_rank].slots)
    return bind_ranks(topology, ranks, core_list=job.core_list, use_hyperthreads=job.use_hyperthreads)


def _threads(job: JobPlan, binding: RankBinding) -> int:
    # A core list that names both threads of a core means to use both.
    counts_threads = job.use_hyperthreads or job.core_list is not None
    return len(binding.cpus) if counts_threads else binding.cores
