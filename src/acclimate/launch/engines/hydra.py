"""Hydra, the starter that MPICH and Intel MPI share."""

from __future__ import annotations

from collections.abc import Sequence

from acclimate.launch.plan.hostfile import HostPlan


def arguments(hostfile: str, exported: Sequence[str], ranks: int) -> list[str]:
    """Where the ranks go, and which variables; without these Hydra carries all of the environment."""
    return ["-f", hostfile, "-n", str(ranks), "-genvlist", ",".join(exported)]


def host_line(host: HostPlan) -> str:
    """A host in Hydra's hostfile: its name and how many ranks it takes before the next host's turn."""
    return f"{host.name}:{len(host.slots)}"
