"""``init_distributed``: creates the default process group on the accelerator's best available backend.

It reads this process's rank from the environment variables that its launcher set."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from acclimate.comm.backend import LONGEST_TIMEOUT, NAME, register
from acclimate.errors import InvalidEnvironmentError, InvalidRankError, UnsupportedError, excerpt
from acclimate.host.rank_variables import LAUNCHERS, SLURM, TORCHRUN, RankVariables
from acclimate.host.slurm_allocation import NODE_INDEX, NODE_LIST, expand_hosts, in_step, tasks_of_nodes
from acclimate.selection import get_accelerator

_HOST = "cpu"


def init_distributed(
    backend: str | None = None,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Creates the default process group of ``torch.distributed``, unless it exists.

    Reads the rank from the environment variables of torchrun, ``acclimate run``, an MPI, Slurm, Flux, PALS or
    jsrun, and sets torchrun's variables that are unset or empty. A process without a launcher becomes a group
    of one rank; a Slurm batch script that starts no step is such a process.

    Args:
        backend: a backend of ``torch.distributed``. ``None``: the accelerator's
            ``communication_backend_name()``; on the CPU ``shm``, unless ``ACCLIMATE_COMM`` names another.
        timeout: the timeout of each collective; ``None`` is torch's default.
        init_method: the URL that ``torch.distributed.init_process_group`` takes. ``None``: ``MASTER_ADDR``
            and ``MASTER_PORT``, or an address derived from the job's variables.
        rank: this process's rank; -1 detects it.
        world_size: the number of ranks; -1 detects it.

    Raises:
        InvalidRankError: only one of ``rank`` and ``world_size`` was given, or ``rank`` is not less than
            ``world_size``.
        InvalidRankError: the variables of two launchers contradict each other.
        InvalidEnvironmentError: a launcher's variable has an invalid value or is missing.
        UnsupportedError: this torch is built without ``torch.distributed``.
    """
    timeout = None if timeout is None else min(timeout, LONGEST_TIMEOUT)
    if not dist.is_available():
        raise UnsupportedError("This torch is built without torch.distributed. Install a torch that has it.")
    register()
    if dist.is_initialized():
        return
    _check(rank, world_size)
    chosen = backend or _best_backend()
    place = find_place(os.environ) if rank < 0 else None
    if place is not None:
        rank, world_size = place.rank, place.world_size
        _export_as_torchrun(place, None if init_method else master_address(place, os.environ))
    if rank < 0:
        dist.init_process_group(
            chosen, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1, timeout=timeout
        )
        return
    dist.init_process_group(
        chosen, init_method=init_method or "env://", rank=rank, world_size=world_size, timeout=timeout
    )


def _check(rank: int, world_size: int) -> None:
    if (rank < 0) != (world_size < 0):
        raise InvalidRankError(
            f"rank is {rank} and world_size is {world_size}. Pass both, or neither to have them detected."
        )
    if rank >= world_size >= 0:
        raise InvalidRankError(f"rank is {rank}, but must be less than world_size, which is {world_size}.")


def _best_backend() -> str:
    accelerator = get_accelerator()
    if accelerator.device_type == _HOST and not os.environ.get("ACCLIMATE_COMM"):
        return NAME
    return accelerator.communication_backend_name()


def _export_as_torchrun(place: Place, master: tuple[str, int] | None) -> None:
    values: dict[str, int | str | None] = {
        TORCHRUN.rank: place.rank,
        TORCHRUN.world_size: place.world_size,
        TORCHRUN.local_rank: place.local_rank,
        TORCHRUN.local_size: place.local_size,
    }
    if master is not None:
        values |= {"MASTER_ADDR": master[0], "MASTER_PORT": master[1]}
    for name, value in values.items():
        if value is not None and not os.environ.get(name, "").strip():
            os.environ[name] = str(value)


# Below the ephemeral ports that systems give to clients.
_FIRST_PORT, _PORTS = 15_000, 15_000


@dataclass(frozen=True)
class Place:
    """A process's rank in its job. Values that no launcher set are ``None``."""

    variables: RankVariables
    """Those that give the rank."""
    rank: int
    world_size: int
    local_rank: int | None
    local_size: int | None
    job: tuple[str, ...] = ()
    """Variables that name the job, of all launchers that give this rank."""

    def __str__(self) -> str:
        names = self.variables
        return f"{names.rank}={self.rank} and {names.world_size}={self.world_size} ({names.launcher})"


def find_place(environ: Mapping[str, str]) -> Place | None:
    """Returns this process's place in its job; ``None`` if no launcher started it.

    Raises:
        InvalidEnvironmentError: a variable has an invalid value, or only one of rank and number is set.
        InvalidRankError: the variables of two launchers contradict each other.
    """
    # In a batch script Slurm sets the variables of a task too, although the script is not a task.
    told = [names for names in LAUNCHERS if names.launcher != SLURM.launcher or in_step(environ)]
    inner: Place | None = None
    found = set[str]()
    for names in told:
        outer = None if names.launcher in found else _place(names, environ)
        if outer is None:
            continue
        found.add(names.launcher)
        if inner is None:
            inner = outer
        elif (inner.rank, inner.world_size) == (outer.rank, outer.world_size):
            # One launcher through the interface of another, such as srun --mpi=pmi2, with some facts in each.
            inner = _completed(inner, outer)
        elif not _nests(inner, outer):
            raise InvalidRankError(
                f"This process has two ranks: {inner}, but {outer}. Unset the variables of the launcher that "
                "did not start it, or give rank and world_size."
            )
    if inner is None:
        _check_nothing_is_missing(told, environ)
        return None
    if inner.local_rank is None and inner.local_size == inner.world_size:
        return replace(inner, local_rank=inner.rank)
    return inner


def master_address(place: Place, environ: Mapping[str, str]) -> tuple[str, int]:
    """Returns the address and port of the job's rank 0, at which its ranks rendezvous.

    Raises:
        InvalidEnvironmentError: ``MASTER_ADDR`` or ``MASTER_PORT`` is not set, and the launcher's variables
            do not determine it.
    """
    address, port = environ.get("MASTER_ADDR", "").strip(), environ.get("MASTER_PORT", "").strip()
    if port and not (port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536):
        raise InvalidEnvironmentError(f'MASTER_PORT is "{port}", but must be a number from 1 to 65535.')
    return address or _first_host(place, environ), int(port) if port else _port_of_job(place, environ)


def _place(names: RankVariables, environ: Mapping[str, str]) -> Place | None:
    """Returns what these variables tell; ``None`` if one that must be set is not."""
    rank = _number(names.rank, environ, 0)
    world_size = _number(names.world_size, environ, 1)
    if rank is None or world_size is None:
        return None
    if rank >= world_size:
        raise InvalidEnvironmentError(
            f"{names.rank} is {rank}, but must be less than {names.world_size}, which is {world_size}."
        )
    local_rank, local_size = _number(names.local_rank, environ, 0), _local_size(names, world_size, environ)
    # Slurm also passes on the request for the allocation, from which its steps may differ.
    if names.launcher != SLURM.launcher and local_size is not None:
        _check_on_this_host(names, local_rank, local_size, world_size)
    return Place(names, rank, world_size, local_rank, local_size, names.job)


def _check_on_this_host(
    names: RankVariables, local_rank: int | None, local_size: int, world_size: int
) -> None:
    if local_size > world_size:
        raise InvalidEnvironmentError(
            f"{names.local_size} is {local_size}, but must be at most {names.world_size}, which is "
            f"{world_size}."
        )
    if local_rank is not None and local_rank >= local_size:
        raise InvalidEnvironmentError(
            f"{names.local_rank} is {local_rank}, but must be less than {names.local_size}, which is "
            f"{local_size}."
        )


def _local_size(names: RankVariables, world_size: int, environ: Mapping[str, str]) -> int | None:
    if _number(names.hosts, environ, 1) == 1:
        return world_size
    if names.launcher != SLURM.launcher:
        return _number(names.local_size, environ, 1)
    counts = tasks_of_nodes(environ.get(names.local_size, ""))
    if len(counts) <= 1 or len(set(counts)) == 1:
        return counts[0] or None if counts else None
    node = environ.get(NODE_INDEX, "")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def _completed(inner: Place, outer: Place) -> Place:
    """Returns a place with the facts of two launchers, which give it the same rank."""
    return replace(
        inner,
        local_rank=outer.local_rank if inner.local_rank is None else inner.local_rank,
        local_size=outer.local_size if inner.local_size is None else inner.local_size,
        job=(*inner.job, *outer.job),
    )


def _check_nothing_is_missing(told: Sequence[RankVariables], environ: Mapping[str, str]) -> None:
    """Refuses a process to which a launcher told only one of its rank and the number of ranks."""
    for names in told:
        known = [name for name in (names.rank, names.world_size) if environ.get(name, "").strip()]
        if not known:
            continue
        sharing = [variables for variables in told if {variables.rank, variables.world_size} & {*known}]
        missing = sorted({rank.world_size if rank.rank in known else rank.rank for rank in sharing} - {""})
        lacks = f"{' or '.join(missing)} is not set" if missing else "nothing gives the number of ranks"
        raise InvalidEnvironmentError(
            f'{known[0]} is "{environ[known[0]].strip()}" ({names.launcher}), but {lacks}. Set RANK, '
            f"WORLD_SIZE and LOCAL_RANK for each process, or unset {known[0]} if this process is alone."
        )


def _number(variable: str, environ: Mapping[str, str], least: int) -> int | None:
    text = environ.get(variable, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10) or int(text) < least:
        raise InvalidEnvironmentError(
            f'{variable} is "{excerpt(text)}", but must be an integer from {least} to 999999999.'
        )
    return int(text)


def _nests(inner: Place, outer: Place) -> bool:
    """Whether one launcher runs under another: in its only task, in its only task of each host, or with all
    of its ranks in one task.

    The two may number the hosts differently, and start different numbers of ranks on them: torchrun's
    rendezvous sorts hosts by name, and mpirun uses srun only for hosts that it does not run on itself.
    """
    if outer.world_size == 1:
        return True
    if inner.world_size <= outer.world_size:
        return 1 < inner.world_size < outer.world_size and inner.local_size == inner.world_size
    local_size = inner.local_size or 0
    return (
        outer.local_size == 1
        or local_size == inner.world_size
        or (local_size * outer.world_size == inner.world_size and inner.rank // local_size == outer.rank)
    )


def _first_host(place: Place, environ: Mapping[str, str]) -> str:
    if place.local_size == place.world_size:
        return "127.0.0.1"
    # mpirun starts its daemons as a step, which lacks the host that mpirun runs on: that of rank 0.
    is_step = set(SLURM.job) <= set(place.job)
    hosts = (is_step and environ.get("SLURM_STEP_NODELIST")) or environ.get(NODE_LIST)
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
    names = [environ[name] for name in place.job if environ.get(name)]
    if not names and place.local_size == place.world_size:
        names = [f"the parent of all ranks is {os.getppid()}"]
    if not names:
        raise InvalidEnvironmentError(
            f"{place} does not give the port of rank 0. Set MASTER_PORT to a free port."
        )
    return _FIRST_PORT + int(hashlib.sha256("\n".join(names).encode()).hexdigest(), 16) % _PORTS
