"""DeepSpeed's op that sums a tensor over the ranks of one host: its builder, and its functions."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from acclimate.comm.backend import TRANSPORT, TransportBuilder, gloo_instead
from acclimate.comm.rendezvous import Rendezvous, are_on_one_host, require_rank, store_for, why_not_shared
from acclimate.errors import InvalidEnvironmentError, UnsupportedError
from acclimate.ops import registry
from acclimate.ops.build.recipe import Source
from acclimate.ops.simd import chosen_isa


class ShareMemCommBuilder(TransportBuilder):
    """``load()`` returns this module: ``initialize(size, rank)`` and ``inference_all_reduce(tensor)``."""

    name = "shm_comm"

    def sources(self) -> list[str | Source]:
        return ["csrc/op.cpp", *TRANSPORT]

    def cxx_args(self) -> list[str]:
        return [*super().cxx_args(), "-DACCLIMATE_ONLY_SUMS"]

    def incompatibility(self) -> str | None:
        return _why_not_here() or super().incompatibility()

    def define(self) -> None:
        registry.define(
            (
                "shm_comm_bytes(int ranks, int slot_bytes, int ring_bytes) -> int",
                "shm_comm_open(int descriptor, int rank, int[] processes, int slot_bytes, int ring_bytes, "
                "int timeout_ms, bool has_spare_cores, int isa) -> ()",
                "shm_comm_close() -> ()",
            )
        )
        registry.define_in_place("inference_all_reduce_(Tensor(a!) x) -> ()", _through_gloo)

    def module(self) -> ModuleType:
        return sys.modules[__name__]


_TIMEOUT = timedelta(minutes=30)
_MOST_RANKS = 256


@dataclass
class _State:
    """The group of this process."""

    size: int = 0
    rank: int = -1
    gloo: Any = None
    """Used if the ranks cannot share memory."""
    store: Any = None


_state = _State()
_groups = itertools.count()


def _why_not_here() -> str | None:
    """Returns why no library can be built for this system; ``None`` if one can."""
    if sys.platform.startswith("linux"):
        return None
    return f"the op needs Linux (memfd, futex), and this is {sys.platform}"


def initialize(size: int, rank: int) -> None:
    """Creates the group of all ranks, unless one of this size and rank exists.

    The ranks find each other through the default group of ``torch.distributed`` if it has this size, else at
    ``MASTER_ADDR`` and ``MASTER_PORT``. Ranks that cannot share memory use gloo, and rank 0 logs a warning.

    Raises:
        InvalidRankError: ``rank`` is not from 0 to ``size`` - 1.
        InvalidEnvironmentError: there is no default group of this size, and ``MASTER_ADDR`` is not set.
    """
    require_rank(size, rank)
    if (_state.size, _state.rank) == (size, rank):
        return
    store = store_for("shm_comm", next(_groups), size, rank)
    rendezvous = Rendezvous(store, rank, size, _TIMEOUT)
    offers = rendezvous.offers(_why_not_here() or ("" if _is_native() else "the op was not built"))
    refusal = why_not_shared(offers, _MOST_RANKS)
    if not are_on_one_host(offers):
        refusal = refusal or "they are on different hosts, or in different containers"
    if not refusal:
        _, refusal = rendezvous.join(offers, torch.ops.acclimate.shm_comm_bytes, _open)
    _state.gloo = gloo_instead(store, rank, size, _TIMEOUT, refusal) if refusal else None
    # Rank 0 may get here first. If it hosts the store, it must stay until the others have read it.
    _state.size, _state.rank, _state.store = size, rank, store


def get_rank() -> int:
    """Returns this process's rank; -1 before :func:`initialize`."""
    return _state.rank


def get_world_size() -> int:
    """Returns the number of ranks; 0 before :func:`initialize`."""
    return _state.size


def vector_kernel_level() -> int:
    """Returns DeepSpeed's level of vector instructions: 1 reduces fp32, 2 also bf16.

    Returns:
        2 on every processor: the op chooses its own kernels, one of which needs no vector instructions.
    """
    return 2


def inference_all_reduce(tensor: torch.Tensor, op: Any = None) -> torch.Tensor:
    """Replaces a CPU tensor by its sum over all ranks, and returns it.

    Every rank gets the same bits. fp16 and bf16 are summed in fp32. Inside ``torch.compile`` call the
    operator itself, ``torch.ops.acclimate.inference_all_reduce_``.

    Args:
        tensor: a tensor of any strides and any dtype that has a sum.
        op: ``ReduceOp.SUM`` or ``None``, which means the same.

    Raises:
        UnsupportedError: ``op`` is another reduction.
    """
    if op is not None and op != dist.ReduceOp.SUM:
        raise UnsupportedError(
            f"inference_all_reduce supports only ReduceOp.SUM, but op is {op}. "
            "Use torch.distributed.all_reduce."
        )
    if _state.gloo is None:
        torch.ops.acclimate.inference_all_reduce_(tensor)
    else:
        _through_gloo(tensor)
    return tensor


def _through_gloo(x: torch.Tensor) -> None:
    if _state.gloo is None:
        raise InvalidEnvironmentError("inference_all_reduce needs initialize(size, rank) first.")
    dense = x.contiguous()
    _state.gloo.allreduce([dense]).wait()
    if dense is not x:
        x.copy_(dense)


def _open(*settings: Any) -> None:
    torch.ops.acclimate.shm_comm_open(*settings, chosen_isa())


def _is_native() -> bool:
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(
            "acclimate::shm_comm_open", "CompositeExplicitAutograd"
        )
    )
