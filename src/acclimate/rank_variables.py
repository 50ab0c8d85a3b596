"""The environment variables in which launchers tell a process its rank."""

from __future__ import annotations

from dataclasses import dataclass

from acclimate.slurm_allocation import JOB_ID


@dataclass(frozen=True)
class RankVariables:
    """The names of one launcher's environment variables."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...] = ()
    """Variables that name the job, with the same value on all of its ranks."""


TORCHRUN = RankVariables("torchrun or acclimate run", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = RankVariables(
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
HYDRA = RankVariables(
    "MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_ID",)
)
SLURM = RankVariables(
    "Slurm",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_NTASKS_PER_NODE",
    (JOB_ID, "SLURM_JOBID"),
)
