"""One process for each rank, started by MPICH's ``mpiexec``."""

from __future__ import annotations

from acclimate.launch.engines.hydra import HydraEngine


class Mpich(HydraEngine):
    """MPICH."""

    name = "mpich"
    remedy = "Install MPICH on all hosts (Debian: mpich; pip: mpich) and put its mpiexec on PATH."
    programs = ("mpiexec.hydra", "mpiexec", "mpiexec.mpich")
    version_text = "HYDRA build details"
    binds_nothing = ("-bind-to", "none")

    def settings(self, ssh_options: str) -> dict[str, str]:
        return {"HYDRA_LAUNCHER_EXTRA_ARGS": ssh_options}
