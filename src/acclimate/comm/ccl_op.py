"""DeepSpeed's op that sums a tensor over ranks with Intel's oneCCL: its builder, and its functions."""

from __future__ import annotations

import itertools
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import torch

from acclimate.comm.rendezvous import require_rank, store_for
from acclimate.errors import OpBuildError
from acclimate.ops import registry
from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.build.recipe import Source


class CCLCommBuilder(OpBuilder):
    """``load()`` returns this module: ``initialize(size, rank)`` and ``inference_all_reduce(tensor)``."""

    name = "ccl_comm"

    def sources(self) -> list[str | Source]:
        return ["csrc/ccl_op.cpp"]

    def cxx_args(self) -> list[str]:
        folder = oneccl_folder()
        if folder is None:
            return []
        return [
            f"-isystem{folder / 'include'}",
            # Another version builds another library.
            f'-DACCLIMATE_ONECCL="{_version(folder)}"',
            "-fvisibility=hidden",
        ]

    def link_args(self) -> list[str]:
        folder = oneccl_folder()
        if folder is None:
            return []
        # oneCCL's own dependencies are found through this path too: DT_RPATH does that, DT_RUNPATH does not.
        libraries = folder / "lib"
        return [f"-L{libraries}", "-lccl", f"-Wl,--disable-new-dtags,-rpath,{libraries}"]

    def incompatibility(self) -> str | None:
        if oneccl_folder() is None:
            return (
                "oneCCL's headers (oneapi/ccl.hpp) and library are neither in this Python environment nor "
                "under CCL_ROOT; install the packages oneccl and oneccl-devel"
            )
        return super().incompatibility()

    def load(self, verbose: bool = False) -> ModuleType:
        """Loads the op, building its library first if needed.

        Raises:
            OpBuildError: :meth:`incompatibility` says why it cannot be built.
        """
        reason = self.incompatibility()
        if reason is not None:
            raise OpBuildError(f'The op "{self.name}" cannot be built: {reason}.')
        return super().load(verbose)

    def define(self) -> None:
        registry.define(
            (
                "ccl_comm_address(Tensor(a!) address) -> ()",
                "ccl_comm_open(int size, int rank, Tensor address) -> ()",
                "ccl_all_reduce_(Tensor(a!) x) -> ()",
            )
        )

    def module(self) -> ModuleType:
        return sys.modules[__name__]


def oneccl_folder() -> Path | None:
    """The folder with oneCCL's ``include`` and ``lib``; ``None`` where there is no oneCCL."""
    named = os.environ.get("CCL_ROOT")
    for folder in (Path(named),) if named else (Path(sys.prefix),):
        if (folder / "include/oneapi/ccl.hpp").exists() and (folder / "lib/libccl.so").exists():
            return folder
    return None


def _version(folder: Path) -> str:
    text = (folder / "include/oneapi/ccl/config.h").read_text(errors="replace")
    numbers = [
        re.search(rf"define CCL_{part}_VERSION\s+(\d+)", text) for part in ("MAJOR", "MINOR", "UPDATE")
    ]
    return ".".join(number[1] for number in numbers if number is not None)


_ADDRESS_BYTES = 256
_groups = itertools.count()
_place = {"size": 0, "rank": -1}


def initialize(size: int, rank: int) -> None:
    """Creates oneCCL's communicator of all ranks, unless one of this size and rank exists.

    The ranks find each other through the default group of ``torch.distributed`` if it has this size, else at
    ``MASTER_ADDR`` and ``MASTER_PORT``. oneCCL uses libfabric unless ``CCL_ATL_TRANSPORT`` is set, because
    its MPI transport works only under an MPI launcher.

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
