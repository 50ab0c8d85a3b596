"""Reads this process's rank from the environment variables that its launcher set."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from acclimate.errors import ConflictingRanksError, InvalidEnvironmentError
from acclimate.rank_variables import HYDRA, OPEN_MPI, SLURM, TORCHRUN, RankVariables
from acclimate.slurm_allocation import NODE_LIST, expand_hosts, in_step

# Below the ephemeral ports that systems give to clients.
_FIRST_PORT, _PORTS = 15_000, 15_000


_LAUNCHERS = (TORCHRUN, OPEN_MPI, HYDRA, SLURM)
"""Inner ones first."""


@dataclass(frozen=True)
class Place:
    """A process's rank in its job. Values that the launcher did not set are ``None``."""

    variables: RankVariables
    rank: int
    world_size: int
    local_rank: int | None
    local_size: int | None

    def __str__(self) -> str:
        names = self.variables
        return f"{names.rank}={self.rank} and {names.world_size}={self.world_size} ({names.launcher})"


def find_place(environ: Mapping[str, str]) -> Place | None:
    """Returns this process's place in its job; ``None`` if no launcher started it.

    Raises:
        InvalidEnvironmentError: a variable has an invalid value.
        ConflictingRanksError: the variables of two launchers contradict each other.
    """
    places = [place for names in _LAUNCHERS if (place := _place(names, environ)) is not None]
    if not places:
        return None
    inner = places[0]
    for outer in places[1:]:
        if not _agree(inner, outer, environ):
            raise ConflictingRanksError(
                f"This process has two ranks: {inner}, but {outer}. Unset the variables of the launcher that "
                "did not start it, or give rank and world_size."
            )
    return inner


def master_address(place: Place, environ: Mapping[str, str]) -> tuple[str, int]:
    """Returns the address and port of the job's rank 0, at which its ranks rendezvous.

    Raises:
        InvalidEnvironmentError: ``MASTER_ADDR`` or ``MASTER_PORT`` is not set, and the launcher's variables
            do not determine it.
    """
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if port is not None and not (port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidEnvironmentError(f'MASTER_PORT is "{port}", but must be a number from 1 to 65535.')
    if not address:
        address = _first_host(place, environ)
    return address, int(port) if port is not None else _port_of_job(place, environ)


def _place(names: RankVariables, environ: Mapping[str, str]) -> Place | None:
    rank = _number(names.rank, environ, 0)
    world_size = _number(names.world_size, environ, 1)
    if rank is None or world_size is None:
        # Launchers set both; a RANK without WORLD_SIZE comes from another program.
        return None
    if rank >= world_size:
        raise InvalidEnvironmentError(
            f"{names.rank} is {rank}, but must be less than {names.world_size}, which is {world_size}."
        )
    local_rank = _number(names.local_rank, environ, 0)
    # Slurm writes "4(x2)" for the tasks of several nodes.
    local_size = environ.get(names.local_size, "")
    return Place(names, rank, world_size, local_rank, int(local_size) if local_size.isdecimal() else None)


def _number(variable: str, environ: Mapping[str, str], least: int) -> int | None:
    text = environ.get(variable, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < least:
        raise InvalidEnvironmentError(f'{variable} is "{text}", but must be an integer of {least} or more.')
    return int(text)


def _agree(inner: Place, outer: Place, environ: Mapping[str, str]) -> bool:
    if (inner.rank, inner.world_size) == (outer.rank, outer.world_size):
        return True
    # One launcher may run under another: torchrun once per host under srun, or in a job's only task.
    if outer.world_size == 1:
        return True
    each = inner.local_size
    if each is not None and each * outer.world_size == inner.world_size and inner.rank // each == outer.rank:
        return True
    # A batch script is not a task, but its variables have the number of one.
    is_batch = outer.variables is SLURM and outer.rank == 0 and not in_step(environ)
    return is_batch and each is not None


def _first_host(place: Place, environ: Mapping[str, str]) -> str:
    if place.local_size == place.world_size:
        return "127.0.0.1"
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get(NODE_LIST)
    if hosts and not set(hosts) & set(",["):
        return hosts
    if hosts:
        with suppress(OSError, subprocess.SubprocessError):
            expanded = expand_hosts(hosts, os.environ)
            if expanded:
                return expanded[0]
    raise InvalidEnvironmentError(
        f"{place} does not give the address of rank 0. Set MASTER_ADDR to the host of rank 0, and "
        "MASTER_PORT to a free port there."
    )


def _port_of_job(place: Place, environ: Mapping[str, str]) -> int:
    names = [environ[name] for name in place.variables.job if environ.get(name)]
    if not names and place.local_size == place.world_size:
        names = [f"the parent of all ranks is {os.getppid()}"]
    if not names:
        raise InvalidEnvironmentError(
            f"{place} does not give the port of rank 0. Set MASTER_PORT to a free port."
        )
    return _FIRST_PORT + int(hashlib.sha256(names[0].encode()).hexdigest(), 16) % _PORTS
