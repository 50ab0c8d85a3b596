"""The module that ``CCLCommBuilder().load()`` returns, with the functions of DeepSpeed's op of that name."""

from __future__ import annotations

import itertools
import os

import torch

from acclimate.comm.op_store import require_rank, store_for
from acclimate.ops import registry

_ADDRESS_BYTES = 256
_groups = itertools.count()
_place = {"size": 0, "rank": -1}


def define() -> None:
    """Defines the operators, once per process."""
    registry.define(
        (
            "ccl_comm_address(Tensor(a!) address) -> ()",
            "ccl_comm_open(int size, int rank, Tensor address) -> ()",
            "ccl_all_reduce_(Tensor(a!) x) -> ()",
        )
    )


def initialize(size: int, rank: int) -> None:
    """Creates oneCCL's communicator of all ranks, unless one of this size and rank exists.

    The ranks find each other through the default group of ``torch.distributed`` if it has this size, else at
    ``MASTER_ADDR`` and ``MASTER_PORT``. oneCCL uses libfabric unless ``CCL_ATL_TRANSPORT`` is set, because
    its MPI transport works only under an MPI launcher.

    Args:
        size: the number of ranks.
        rank: this process's rank.

    Raises:
        InvalidRankError: ``rank`` is not from 0 to ``size`` - 1.
        InvalidEnvironmentError: there is no default group of this size, and ``MASTER_ADDR`` is not set.
    """
    require_rank(size, rank)
    if _place == {"size": size, "rank": rank}:
        return
    os.environ.setdefault("CCL_ATL_TRANSPORT", "ofi")
    os.environ.setdefault("CCL_LOG_LEVEL", "error")
    store = store_for("ccl_comm", next(_groups), size, rank)
    address = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
    if rank == 0:
        torch.ops.acclimate.ccl_comm_address(address)
        store.set("address", bytes(address.tolist()).hex())
    else:
        told = bytes.fromhex(store.get("address").decode())
        address = torch.tensor(list(told), dtype=torch.uint8)
    torch.ops.acclimate.ccl_comm_open(size, rank, address)
    _place.update(size=size, rank=rank)


def get_rank() -> int:
    """Returns this process's rank; -1 before :func:`initialize`."""
    return _place["rank"]


def get_world_size() -> int:
    """Returns the number of ranks; 0 before :func:`initialize`."""
    return _place["size"]


def inference_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Replaces a CPU tensor by its sum over all ranks, and returns it.

    If a rank has exited, oneCCL waits without a timeout. It does not check that all ranks pass the same shape
    and dtype.

    Args:
        tensor: a tensor of any strides; its dtype is an integer of 8 to 64 bits, fp16, bf16, fp32 or fp64.
    """
    torch.ops.acclimate.ccl_all_reduce_(tensor)
    return tensor
