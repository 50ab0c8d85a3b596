"""What ``CCLCommBuilder().load()`` returns: DeepSpeed's functions of its op of this name."""

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
    """Defines the operators, once a process."""
    registry.define(
        (
            "ccl_comm_address(Tensor(a!) address) -> ()",
            "ccl_comm_open(int size, int rank, Tensor address) -> ()",
            "ccl_all_reduce_(Tensor(a!) x) -> ()",
        )
    )


def initialize(size: int, rank: int) -> None:
    """Makes oneCCL's communicator of all ranks; does nothing where there is one of this size and rank.

    The ranks find each other through the default group of ``torch.distributed`` where there is one of this
    size, else at ``MASTER_ADDR`` and ``MASTER_PORT``. oneCCL's transport is libfabric unless
    ``CCL_ATL_TRANSPORT`` says otherwise, as MPI works only under its own launcher.

    Args:
        size: the number of ranks.
        rank: this one.

    Raises:
        InvalidRankError: there is no such rank.
        InvalidEnvironmentError: there is neither a default group nor ``MASTER_ADDR``.
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
    """This rank; -1 before :func:`initialize`."""
    return _place["rank"]


def get_world_size() -> int:
    """The number of ranks; 0 before :func:`initialize`."""
    return _place["size"]


def inference_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Replaces a tensor of the host by its sum over all ranks, and returns it.

    oneCCL waits for ever for a rank that has ended, and does not compare what ranks call.

    Args:
        tensor: of an integer of 8 to 64 bits, fp16, bf16, fp32 or fp64, and any strides.
    """
    torch.ops.acclimate.ccl_all_reduce_(tensor)
    return tensor
