"""Native operators: their build system, optimizers, asynchronous I/O, and linear layers for inference.

Names are resolved on first use: importing this package neither imports torch nor compiles anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acclimate.host.lazy import lazy_names

if TYPE_CHECKING:
    from acclimate.ops.aio import AsyncIOHandle
    from acclimate.ops.build.builder import OpBuilder
    from acclimate.ops.build.recipe import Source
    from acclimate.ops.optimizers.adagrad import CPUAdagrad
    from acclimate.ops.optimizers.adam import CPUAdam, FusedAdam
    from acclimate.ops.optimizers.lamb import FusedLamb
    from acclimate.ops.optimizers.lion import CPULion, FusedLion

__all__ = [
    "AsyncIOHandle",
    "CPUAdagrad",
    "CPUAdam",
    "CPULion",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "OpBuilder",
    "Source",
]

_HOMES = {
    "AsyncIOHandle": "acclimate.ops.aio",
    "CPUAdagrad": "acclimate.ops.optimizers.adagrad",
    "CPUAdam": "acclimate.ops.optimizers.adam",
    "CPULion": "acclimate.ops.optimizers.lion",
    "FusedAdam": "acclimate.ops.optimizers.adam",
    "FusedLamb": "acclimate.ops.optimizers.lamb",
    "FusedLion": "acclimate.ops.optimizers.lion",
    "OpBuilder": "acclimate.ops.build.builder",
    "Source": "acclimate.ops.build.recipe",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
