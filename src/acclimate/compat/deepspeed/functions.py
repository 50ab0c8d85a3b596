"""DeepSpeed's functions with its arguments, implemented with acclimate's."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from acclimate import comm
from acclimate import llm as inference
from acclimate.compat.deepspeed.names import missing
from acclimate.errors import UnsupportedError
from acclimate.host import topology
from acclimate.selection import get_accelerator

logger = logging.getLogger("acclimate.deepspeed")
"""DeepSpeed's logger, for code that logs through it."""

installed_ops: dict[str, bool] = {}
"""DeepSpeed's record of ops built at installation: empty, because ops are built when first loaded."""
torch_info = {"version": ".".join(torch.__version__.split(".")[:2])}
"""The torch versions for which those ops were built."""


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs a message on some ranks; on all, if ``ranks`` is ``None`` or empty or has -1 in it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Logs a message and the device memory in use, on rank 0; does nothing without ``force``."""
    if force:
        used, peak = (
            read() / 2**30
            for read in (get_accelerator().memory_allocated, get_accelerator().max_memory_allocated)
        )
        log_dist(f"{message}: {used:.2f} GiB in use, {peak:.2f} GiB at most", ranks=[0])


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
    """Calls :func:`acclimate.init_distributed` with DeepSpeed's arguments.

    ``timeout``, ``init_method``, ``rank`` and ``world_size`` are passed on. The others have no effect: the
    rank and the port are always the launcher's.

    Args:
        dist_backend: passed as ``backend``.
        dist_init_required: ``False`` makes the call do nothing.

    Raises:
        AcclimateError: the errors of :func:`acclimate.init_distributed`.
    """
    if dist_init_required is not False:
        comm.init_distributed(dist_backend, timeout, init_method, rank, world_size)


_WITHOUT_EFFECT = frozenset(
    {
        "checkpoint",
        "enable_cuda_graph",
        "injection_policy",
        "kernel_inject",
        "keep_module_on_host",
        "max_out_tokens",
        "max_tokens",
        "min_out_tokens",
        "replace_method",
        "replace_with_kernel_inject",
        "return_tuple",
        "set_empty_params",
        "triangular_masking",
        "use_triton",
    }
)
"""Settings of DeepSpeed's kernels and of its search for modules to split, which have no effect here."""


def init_inference(model: Any, config: str | Mapping[str, Any] | None = None, **settings: Any) -> Any:
    """Calls :func:`acclimate.init_inference` with DeepSpeed's settings, in ``config`` or as arguments.

    Args:
        model: passed on.
        config: settings, or the path of a JSON file with settings; arguments take precedence.
        settings: ``tensor_parallel={"tp_size": n}`` or ``mp_size=n`` is the number of ranks, 1 by default;
            ``dtype`` is a torch dtype. Settings of DeepSpeed's kernels have no effect.

    Raises:
        ValueError: ``config`` is neither a mapping nor a path, as in DeepSpeed.
        UnsupportedError: a setting that changes results is not supported here.
        AcclimateError: the errors of :func:`acclimate.init_inference`.
    """
    found = json.loads(Path(config).read_text()) if isinstance(config, str) else config or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"'config' must be a mapping or the path of a JSON file with one, not {found!r}.")
    wanted = {**found, **settings}
    mp_size = wanted.pop("mp_size", None)
    tensor_parallel = wanted.pop("tensor_parallel", wanted.pop("tp", None)) or {}
    ranks = tensor_parallel.get("tp_size", mp_size)
    dtype = wanted.pop("dtype", "auto")
    unknown = sorted(name for name, value in wanted.items() if value and name not in _WITHOUT_EFFECT)
    if unknown:
        raise UnsupportedError(
            f"Without DeepSpeed, deepspeed.init_inference() does not support {', '.join(unknown)}. "
            "Remove it, or see acclimate.init_inference() for the supported settings."
        )
    name = str(dtype).rpartition(".")[2]
    return inference.init_inference(model, ranks or 1, _SHORT_NAMES.get(name, name))


_SHORT_NAMES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}


def collective(module: str, name: str) -> Any:
    """Returns the function of ``torch.distributed`` for a name that ``deepspeed.comm`` shares with it.

    Raises:
        AttributeError: it has no such name.
    """
    try:
        return getattr(dist, name)
    except AttributeError:
        raise AttributeError(missing(module, name)) from None


def get_local_rank() -> int:
    """Returns this process's local rank on its host, from the launcher's ``LOCAL_RANK``."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    """Returns the group of all ranks."""
    return dist.group.WORLD


def inference_all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
    """Calls ``torch.distributed.all_reduce``, which uses shared memory with acclimate's backend ``shm``."""
    dist.all_reduce(tensor, op, group)


def get_numa_cores() -> list[list[int]]:
    """Returns the processors of each NUMA node, in the order of the nodes."""
    found = topology.read_topology()
    return [sorted(node.cpus) for node in found.nodes]


def initialize(*args: Any, **options: Any) -> NoReturn:
    """Raises, because DeepSpeed's training engine has no replacement here.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "deepspeed.initialize() is part of DeepSpeed, which is not installed. Install it and start the "
        "program with `acclimate run --deepspeed`: it then trains on this accelerator. Without it, "
        "torch.distributed.fsdp.fully_shard divides parameters, gradients and optimizer states as ZeRO 3 "
        "does."
    )
