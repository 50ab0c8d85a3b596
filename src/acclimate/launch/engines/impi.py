"""One process for each rank, started by Intel MPI's ``mpirun``."""

from __future__ import annotations

from acclimate.launch.engines.hydra import HydraEngine


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
