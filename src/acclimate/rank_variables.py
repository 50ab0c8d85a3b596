"""The environment variables in which launchers tell a process its rank, and Slurm's list of hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
    ("SLURM_JOB_ID", "SLURM_JOBID"),
)

_SCONTROL_S = 60


def expand_slurm_hosts(names: str, environ: Mapping[str, str]) -> list[str]:
    """Returns the hosts of a list in Slurm's notation, such as ``node[1-3]``.

    Args:
        names: the list.
        environ: the variables of ``scontrol``, which is looked up in its ``PATH``.

    Raises:
        OSError: ``scontrol`` cannot be run.
        subprocess.SubprocessError: it failed, or did not answer within 60 s.
    """
    import subprocess  # most processes that import this module start none

    asked = subprocess.run(
        ["scontrol", "show", "hostnames", names],
        capture_output=True,
        text=True,
        check=True,
        timeout=_SCONTROL_S,
        env=dict(environ),
    )
    return asked.stdout.split()
