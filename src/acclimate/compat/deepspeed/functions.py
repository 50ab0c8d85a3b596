"""Functions of DeepSpeed with its arguments, which call ours."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from acclimate import comm
from acclimate.errors import UnsupportedError

logger = logging.getLogger("acclimate.deepspeed")
"""DeepSpeed's logger, for code that logs through it."""

installed_ops: dict[str, bool] = {}
"""The ops that were built when DeepSpeed was installed: none, all are built when they are first loaded."""
torch_info = {"version": ".".join(torch.__version__.split(".")[:2])}
"""The torch for which those were built."""


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs a message on some ranks; on all, if ``ranks`` is ``None`` or empty or has -1 in it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """As :func:`acclimate.init_distributed`, with DeepSpeed's arguments.

    Args:
        dist_backend: ``backend`` there.
        auto_mpi_discovery: has no effect: the rank is always found in the variables of the launcher.
        distributed_port: has no effect: the port is the launcher's.
        verbose: has no effect.
        timeout: as there.
        init_method: as there.
        dist_init_required: ``False``: does nothing.
        config: has no effect.
        rank: as there.
        world_size: as there.

    Raises:
        AcclimateError: as :func:`acclimate.init_distributed`.
    """
    if dist_init_required is not False:
        comm.init_distributed(dist_backend, timeout, init_method, rank, world_size)


def collective(name: str) -> Any:
    """Returns what ``torch.distributed`` has under a name that ``deepspeed.comm`` shares with it.

    Raises:
        AttributeError: it has no such name.
    """
    return getattr(dist, name)


def initialize(*args: Any, **options: Any) -> NoReturn:
    """DeepSpeed's training engine, which is not here.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "deepspeed.initialize() is part of DeepSpeed, which is not installed. Install it and start the "
        "program with `acclimate run --deepspeed`: it then trains on this accelerator. Without it, "
        "torch.distributed.fsdp.fully_shard divides parameters, gradients and optimizer states as ZeRO 3 "
        "does (examples/train_gpt.py)."
    )
