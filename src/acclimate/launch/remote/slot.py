"""``python -m acclimate.launch.remote.slot``: one rank, started by MPI or Slurm, which say which one it is.

Everything else (what to run, with which cores and variables) comes from the launcher, which it calls.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from acclimate.errors import AcclimateError, LaunchProtocolError
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.plan.rank_plan import RankPlan
from acclimate.launch.remote.callback import LAUNCHER_VARIABLE, call_launcher
from acclimate.launch.remote.launcher_connection import LauncherConnection, run_assigned_ranks

# Rank, rank on its host: in the words of Open MPI; of MPICH and Intel MPI; of Slurm. An MPI inside a Slurm
# allocation sets both its own and Slurm's, and its own hold.
_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_LOCALID"),
)


@dataclass(frozen=True)
class Place:
    """Which of a job's ranks this process is."""

    rank: int
    local_rank: int


def read_place(environ: Mapping[str, str]) -> Place:
    """The place that the engine gave this process.

    Raises:
        LaunchProtocolError: the environment names none.
    """
    for rank, local_rank in _VARIABLES:
        if rank in environ and local_rank in environ:
            return Place(int(environ[rank]), int(environ[local_rank]))
    raise LaunchProtocolError(
        f"A slot was started without a place: none of {', '.join(rank for rank, _ in _VARIABLES)} is set. "
        "Slots are started by `acclimate run --launcher …`."
    )


def main() -> int:
    """Runs one rank; returns the exit code."""
    try:
        place = read_place(os.environ)
        channel = call_launcher(os.environ.pop(LAUNCHER_VARIABLE, ""), {"rank": place.rank})
        launcher = LauncherConnection(channel)
        first = launcher.wait_for("job")
        if first is None:
            return 1
        job = JobPlan.from_json(first["job"])
        node_rank = job.node_of(place.rank)
        local_rank = place.rank - job.rank_offset(node_rank)
        if local_rank != place.local_rank:
            launcher.say(
                refused=f"rank {place.rank} was placed as number {place.local_rank} there, where the "
                f"hostfile has it as number {local_rank}. Leave placing ranks out of --launcher_args."
            )
            return 0

        def mine(ranks: Sequence[RankPlan]) -> Sequence[RankPlan]:
            return ranks[local_rank : local_rank + 1]

        return run_assigned_ranks(launcher, job, node_rank, mine, channel.own_address)
    except AcclimateError as error:
        sys.stderr.write(f"acclimate run: error: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
