"""One process per slot, started by Intel MPI's ``mpirun``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from acclimate.launch.engines import hydra
from acclimate.launch.engines.mpi import launch_slots, ssh_options
from acclimate.launch.engines.programs import find_program
from acclimate.launch.plan.job import JobPlan

if TYPE_CHECKING:
    from acclimate.launch.plan.outcome import Outcome


def find(environ: Mapping[str, str]) -> str | None:
    """Path of Intel MPI's mpirun; None where it is not installed."""
    return find_program(("mpirun", "mpiexec.hydra", "mpiexec"), "Intel(R) MPI Library", environ)


def launch(job: JobPlan, program: str) -> Outcome:
    """Runs the job to its end.

    Raises:
        HostUnreachableError: a host does not answer or cannot do its part; no rank was started.
    """

    def arguments(hostfile: str, exported: Sequence[str]) -> list[str]:
        return [*hydra.arguments(hostfile, exported, job.world_size), "-genv", "I_MPI_PIN", "0"]

    settings = {"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": ssh_options(job)}
    return launch_slots(job, program, arguments, hydra.host_line, settings)
