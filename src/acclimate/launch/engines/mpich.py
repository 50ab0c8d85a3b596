"""One process per slot, started by MPICH's ``mpiexec``."""

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
    """Path of MPICH's mpiexec; None where it is not installed."""
    return find_program(("mpiexec.hydra", "mpiexec", "mpiexec.mpich"), "HYDRA build details", environ)


def launch(job: JobPlan, program: str) -> Outcome:
    """Runs the job to its end.

    Raises:
        HostUnreachableError: a host does not answer or cannot do its part; no rank was started.
    """

    def arguments(hostfile: str, exported: Sequence[str]) -> list[str]:
        return [*hydra.arguments(hostfile, exported, job.world_size), "-bind-to", "none"]

    settings = {"HYDRA_LAUNCHER_EXTRA_ARGS": ssh_options(job)}
    return launch_slots(job, program, arguments, hydra.host_line, settings)
