"""``init_distributed``: creates the default process group on the accelerator's best available backend."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from acclimate.comm.backend import LONGEST_TIMEOUT, NAME, register
from acclimate.comm.ranks import Place, find_place, master_address
from acclimate.errors import InvalidRankError, UnsupportedError
from acclimate.host.rank_variables import TORCHRUN
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
