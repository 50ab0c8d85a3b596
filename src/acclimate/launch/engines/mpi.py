"""The base of the MPI engines: one process for each rank, bound by the launcher and not by MPI.

Variables are passed on by name, so that their values are not visible in a list of processes.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from acclimate.host.rank_variables import RankVariables
from acclimate.host.slurm_allocation import in_allocation
from acclimate.launch.engines.engine import Engine, rank_agent
from acclimate.launch.plan.hostfile import HostPlan
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.remote.ssh_client import CONNECT_S, common_port, find_ssh, ssh_options

if TYPE_CHECKING:
    from acclimate.launch.plan.outcome import Outcome
    from acclimate.launch.remote.ssh_check import SshReachabilityCheck


class MpiEngine(Engine):
    """One process for each rank, started by an MPI's own program."""

    programs: ClassVar[tuple[str, ...]]
    """The names of its program."""
    version_text: ClassVar[str]
    """A string in its ``--version`` output that no other MPI prints."""
    rank_variables: ClassVar[RankVariables]

    @abstractmethod
    def arguments(self, ranks: int, hostfile: str, names: Sequence[str]) -> list[str]:
        """Returns the program's arguments, without the user's own and the agent's command.

        Args:
            ranks: the number of all ranks.
            hostfile: the path of the file with the lines of :meth:`host_line`.
            names: the names of the variables to pass on.
        """

    @abstractmethod
    def host_line(self, host: HostPlan) -> str:
        """Returns a line of this MPI's hostfile."""

    @abstractmethod
    def settings(self, ssh_options: str) -> dict[str, str]:
        """Returns the variables that pass these options to this MPI's ssh."""

    def find(self, environ: Mapping[str, str]) -> str | None:
        from acclimate.launch.engines.programs import find_program

        return find_program(self.programs, self.version_text, environ)

    def launch(self, job: JobPlan, program: str) -> Outcome:
        # Imported only for a job on many hosts, so that ranks of this host alone start sooner.
        from acclimate.launch.remote.engine_program import EngineProgram, MemoryFile

        settings = self.settings("" if _in_slurm() else " ".join(_ssh_options(job, CONNECT_S)))
        with MemoryFile("".join(f"{self.host_line(host)}\n" for host in job.hosts)) as hostfile:

            def command(where: Mapping[str, str]) -> list[str]:
                names = sorted({*job.environment, *where})
                arguments = self.arguments(job.world_size, hostfile.path, names)
                return [program, *arguments, *job.launcher_args, *rank_agent(self.rank_variables)]

            return EngineProgram(
                job,
                command,
                each_rank=True,
                environment=settings,
                hostfile=hostfile,
                ssh_check=_ssh_check(job),
            ).run()


def _ssh_options(job: JobPlan, connect_s: int) -> list[str]:
    """Returns options with which MPI's ssh asks for no password and gives up on a silent host."""
    port = common_port(job, "MPI")
    return [*ssh_options(connect_s), *([] if port is None else [f"-p{port}"])]


def _in_slurm() -> bool:
    """Whether MPI uses ``srun`` instead of ssh; it would pass ssh's options to it."""
    return in_allocation(os.environ)


def _ssh_check(job: JobPlan) -> SshReachabilityCheck | None:
    """Returns a check of the hosts; ``None`` if MPI does not use ssh, or ssh is not installed."""
    from acclimate.launch.remote.engine_program import CHECK_AFTER_S
    from acclimate.launch.remote.ssh_check import SshReachabilityCheck

    program = find_ssh(os.environ)
    if program is None or _in_slurm():
        return None
    # The check then gives up on a silent host at the same time as MPI's ssh, which started earlier.
    connect_s = CONNECT_S - int(CHECK_AFTER_S)
    return SshReachabilityCheck([host.name for host in job.hosts], [program, *_ssh_options(job, connect_s)])
