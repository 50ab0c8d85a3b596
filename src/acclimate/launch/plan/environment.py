"""The environment variables of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SET_BY_LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""The variables that only the launcher sets."""


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
    return {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        **kept,
        **devices,
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "LOCAL_SIZE": str(place.local_world_size),  # the name that MPI's users and DeepSpeed know
        "NODE_RANK": str(place.node_rank),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
    }
