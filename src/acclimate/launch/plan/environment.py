"""The environment variables of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from acclimate.host.rank_variables import TORCHRUN


@dataclass(frozen=True)
class RankPlace:
    """A rank's place in its job."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int


SET_BY_LAUNCHER: Mapping[str, str] = {
    TORCHRUN.rank: "rank",
    TORCHRUN.local_rank: "local_rank",
    TORCHRUN.world_size: "world_size",
    TORCHRUN.local_size: "local_world_size",
    "LOCAL_SIZE": "local_world_size",  # the name that MPI's users and DeepSpeed know
    "NODE_RANK": "node_rank",
    "MASTER_ADDR": "master_addr",
    "MASTER_PORT": "master_port",
}
"""The variables that only the launcher sets, each with the field of :class:`RankPlace` that it has."""


def rank_environment(
    inherited: Mapping[str, str], place: RankPlace, *, threads: int, devices: Mapping[str, str]
) -> dict[str, str]:
    """Returns all variables of a rank.

    Args:
        inherited: the other variables. The user's ``OMP_NUM_THREADS`` and ``PYTHONUNBUFFERED`` are kept.
        place: the rank's place.
        threads: the number of the rank's own cores.
        devices: the accelerator's visible-devices variable, if it has one, with its value.
    """
    # torchrun's variables, if it started this launcher, would send torch to the outer job's rendezvous.
    kept = {name: value for name, value in inherited.items() if not name.startswith("TORCHELASTIC_")}
    defaults = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    return {
        **kept,
        **{name: value for name, value in defaults.items() if not kept.get(name, "").strip()},
        **devices,
        **{name: str(getattr(place, field)) for name, field in SET_BY_LAUNCHER.items()},
    }
