"""A job, and the ranks of each of its hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from acclimate.errors import LaunchOptionError
from acclimate.host.local_address import interface_towards, own_name_is_loopback
from acclimate.host.topology import Topology, cpu_quota, read_topology
from acclimate.launch.binding.cores import RankBinding, bind_ranks, check_environment
from acclimate.launch.plan.agent_options import AgentOptions
from acclimate.launch.plan.devices import visible_devices
from acclimate.launch.plan.environment import RankPlace, rank_environment
from acclimate.launch.plan.hostfile import HostPlan

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""torch's variable for the network interface of gloo's connections."""


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
    host: str = ""
    """The host's name in the hostfile, for reports; empty: this machine's own name."""
    binding: RankBinding | None = None
    """Its cores and memory nodes; ``None``: as the launcher."""
    log_path: Path | None = None
    """A file to which the rank's output is also appended."""


def plan_ranks(job: JobPlan, node_rank: int, environ: Mapping[str, str]) -> tuple[RankPlan, ...]:
    """Returns the ranks of one host, by local rank; the job's variables take precedence over those inherited.

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
    host = job.hosts[node_rank]
    slots = host.slots
    topology = read_topology()
    bindings: Sequence[RankBinding | None] = (None,) * len(slots)
    if job.binds:
        bindings = bind_host(job, node_rank, topology, inherited)
    share = max(1, len(topology.usable_cores()) // len(slots))
    quota = cpu_quota()
    most = None if quota is None else max(1, int(quota / len(slots)))
    devices = visible_devices(job.accelerator, slots, inherited)
    inherited.update(_gloo_interface(job, node_rank, inherited))
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
                host=host.name if host.is_listed else "",
                binding=binding,
                log_path=Path(job.log_dir, f"rank_{rank}.log") if job.log_dir is not None else None,
            )
        )
    return tuple(plans)


def _gloo_interface(job: JobPlan, node_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns gloo's variable for the interface towards the other hosts, where gloo would not find it.

    gloo listens at the address of the host's own name. If that is a loopback address, as in Debian, the other
    hosts cannot connect.
    """
    if len(job.hosts) == 1 or environ.get(GLOO_INTERFACE) or job.master_addr is None:
        return {}
    # On the first host the master may be reached within the host.
    others = [host.name for host in job.hosts[1:2] if node_rank == 0 and host.is_listed]
    interface = interface_towards([job.master_addr, *others])
    return {GLOO_INTERFACE: interface} if interface is not None and own_name_is_loopback() else {}


def bind_host(
    job: JobPlan, node_rank: int, topology: Topology, environ: Mapping[str, str]
) -> tuple[RankBinding, ...]:
    """Returns the binding of each rank of one host."""
    check_environment(environ)
    ranks = len(job.hosts[node_rank].slots)
    return bind_ranks(topology, ranks, core_list=job.core_list, use_hyperthreads=job.use_hyperthreads)


def _threads(job: JobPlan, binding: RankBinding) -> int:
    # A core list that names both threads of a core means to use both.
    counts_threads = job.use_hyperthreads or job.core_list is not None
    return len(binding.cpus) if counts_threads else binding.cores
