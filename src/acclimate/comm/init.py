"""``init_distributed``: the default process group, on the best backend that the accelerator has here."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from acclimate.comm.backend import NAME, register
from acclimate.comm.ranks import Place, find_place, meeting_point
from acclimate.errors import InvalidRankError, UnsupportedError
from acclimate.selection import get_accelerator

_HOST = "cpu"


def init_distributed(
    backend: str | None = None,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Creates the default process group of ``torch.distributed``; does nothing where there is one.

    The rank is found in the variables of torchrun, ``acclimate run``, Open MPI, MPICH, Intel MPI or Slurm,
    and written to the names that torchrun uses where they are not set. A process that no launcher started is
    a group of one.

    Args:
        backend: a name that ``torch.distributed`` knows. ``None``: for tensors of the host ``shm``, or what
            ``ACCLIMATE_COMM`` names; else the accelerator's ``communication_backend_name()``.
        timeout: of each collective; torch's default where ``None``.
        init_method: where the ranks meet, as ``torch.distributed.init_process_group`` takes it. ``None``: at
            ``MASTER_ADDR`` and ``MASTER_PORT``, or what follows from the job's variables.
        rank: this one; found where -1.
        world_size: the number of ranks; found where -1.

    Raises:
        InvalidRankError: only one of ``rank`` and ``world_size`` was given, or they do not fit together.
        ConflictingRanksError: two launchers say different things.
        InvalidEnvironmentError: a variable of a launcher holds what it cannot hold, or is missing.
        UnsupportedError: this torch is built without ``torch.distributed``.
    """
    if not dist.is_available():
        raise UnsupportedError("This torch is built without torch.distributed. Install one that has it.")
    register()
    if dist.is_initialized():
        return
    _check(rank, world_size)
    chosen = backend or _best_backend()
    place = find_place(os.environ) if rank < 0 else None
    if place is not None:
        rank, world_size = place.rank, place.world_size
        _say_as_torchrun(place, None if init_method else meeting_point(place, os.environ))
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
            f"rank is {rank} and world_size is {world_size}. Give both, or neither to have them found."
        )
    if rank >= world_size >= 0:
        raise InvalidRankError(f"rank is {rank}, but must be less than world_size, which is {world_size}.")


def _best_backend() -> str:
    accelerator = get_accelerator()
    if accelerator.device_type == _HOST and not os.environ.get("ACCLIMATE_COMM"):
        return NAME
    return accelerator.communication_backend_name()


def _say_as_torchrun(place: Place, meeting: tuple[str, int] | None) -> None:
    said: dict[str, int | str | None] = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
    }
    if meeting is not None:
        said |= {"MASTER_ADDR": meeting[0], "MASTER_PORT": meeting[1]}
    for name, value in said.items():
        if value is not None:
            os.environ.setdefault(name, str(value))
