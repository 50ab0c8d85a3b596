"""The environment variables in which launchers tell a process its rank."""

from __future__ import annotations

from dataclasses import dataclass

from acclimate.host.slurm_allocation import JOB_ID


@dataclass(frozen=True)
class RankVariables:
    """The names of one launcher's environment variables; empty for a fact without a variable."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str = ""
    local_size: str = ""
    """The number of ranks on this host; Slurm lists that of each host."""
    hosts: str = ""
    """The number of hosts."""
    job: tuple[str, ...] = ()
    """Variables that together name the job, each with the same value on all of its ranks."""


TORCHRUN = RankVariables("torchrun or acclimate run", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = RankVariables(
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
HYDRA = RankVariables("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SLURM = RankVariables(
    "Slurm",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NUM_NODES",
    (JOB_ID, "SLURM_JOBID", "SLURM_STEP_ID"),
)
"""The variables of a step. A batch script has a rank in the same variables, but is not a task."""

LAUNCHERS = (
    TORCHRUN,
    OPEN_MPI,
    RankVariables(
        "MVAPICH2",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    RankVariables(
        "MVAPICH",
        "MVP_COMM_WORLD_RANK",
        "MVP_COMM_WORLD_SIZE",
        "MVP_COMM_WORLD_LOCAL_RANK",
        "MVP_COMM_WORLD_LOCAL_SIZE",
    ),
    RankVariables("Horovod", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    HYDRA,
    # The same interface, PMI, with the names of Cray's library, and with the job's name from Slurm's plug-in.
    RankVariables("PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", job=("PMI_JOBID",)),
    RankVariables(
        "PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", job=("PALS_APID",)
    ),
    RankVariables(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
        job=("PMIX_NAMESPACE", "LSB_JOBID"),
    ),
    RankVariables("PMIx", "PMIX_RANK", "", job=("PMIX_NAMESPACE",)),
    RankVariables("ALPS", "ALPS_APP_PE", "", job=("ALPS_APP_ID",)),
    RankVariables(
        "Flux",
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        "FLUX_TASK_LOCAL_ID",
        hosts="FLUX_JOB_NNODES",
        job=("FLUX_JOB_ID",),
    ),
    SLURM,
    # What a step of an old Slurm has, and of a user who passes on only the better known names.
    RankVariables(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_NNODES",
        (JOB_ID, "SLURM_JOBID", "SLURM_STEP_ID"),
    ),
)
"""Inner ones first, since one launcher may run under another. Several entries may describe one launcher."""
