"""One process per slot, started by Open MPI's ``mpirun``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from acclimate.launch.engines.mpi import launch_slots, ssh_options
from acclimate.launch.engines.programs import find_program
from acclimate.launch.plan.hostfile import HostPlan
from acclimate.launch.plan.job import JobPlan

if TYPE_CHECKING:
    from acclimate.launch.plan.outcome import Outcome


def find(environ: Mapping[str, str]) -> str | None:
    """Path of Open MPI's mpirun; None where it is not installed."""
    return find_program(("mpirun", "mpirun.openmpi"), "Open MPI", environ)


def launch(job: JobPlan, program: str) -> Outcome:
    """Runs the job to its end.

    Raises:
        HostUnreachableError: a host does not answer or cannot do its part; no rank was started.
    """

    def arguments(hostfile: str, exported: Sequence[str]) -> list[str]:
        where = ["--hostfile", hostfile, "-np", str(job.world_size), "--map-by", "slot"]
        return [*where, "--bind-to", "none", *(word for name in exported for word in ("-x", name))]

    # Under both names: up to release 4 the starter is part of Open MPI, from 5 on it is PRRTE.
    settings = {"PRTE_MCA_plm_ssh_args": ssh_options(job), "OMPI_MCA_plm_rsh_args": ssh_options(job)}
    return launch_slots(job, program, arguments, _host_line, settings)


def _host_line(host: HostPlan) -> str:
    return f"{host.name} slots={len(host.slots)}"
