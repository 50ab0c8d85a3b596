"""``ShareMemCommBuilder``: DeepSpeed's op that sums a tensor over the ranks of one host."""

from __future__ import annotations

from types import ModuleType

from acclimate.comm import shm_op_functions
from acclimate.comm.native import TRANSPORT, TransportBuilder
from acclimate.ops.build.recipe import Source


class ShareMemCommBuilder(TransportBuilder):
    """``load()`` gives ``initialize(size, rank)`` and ``inference_all_reduce(tensor)``."""

    name = "shm_comm"

    def sources(self) -> list[str | Source]:
        """The sources of the ``shm`` backend's transport and of the operator."""
        return ["csrc/op.cpp", *TRANSPORT]

    def cxx_args(self) -> list[str]:
        """The transport's flags, and one that builds only sums."""
        return [*super().cxx_args(), "-DACCLIMATE_ONLY_SUMS"]

    def incompatibility(self) -> str | None:
        """The reason is a system other than Linux or a missing compiler."""
        return shm_op_functions.why_not_here() or super().incompatibility()

    def define(self) -> None:
        """Defines the operators that the library implements."""
        shm_op_functions.define()

    def module(self) -> ModuleType:
        """:mod:`acclimate.comm.shm_op_functions`."""
        return shm_op_functions
