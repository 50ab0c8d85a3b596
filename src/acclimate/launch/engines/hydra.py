"""Hydra, the process manager of MPICH and Intel MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from acclimate.host.rank_variables import HYDRA
from acclimate.launch.engines.mpi import MpiEngine
from acclimate.launch.plan.hostfile import HostPlan


class HydraEngine(MpiEngine):
    """One process for each rank, started by Hydra."""

    rank_variables = HYDRA
    binds_nothing: ClassVar[tuple[str, ...]]
    """Arguments that turn off this MPI's own binding."""

    def arguments(self, ranks: int, hostfile: str, names: Sequence[str]) -> list[str]:
        # Without -genvlist, Hydra exports the whole environment.
        return ["-f", hostfile, "-n", str(ranks), "-genvlist", ",".join(names), *self.binds_nothing]

    def host_line(self, host: HostPlan) -> str:
        return f"{host.name}:{len(host.slots)}"
