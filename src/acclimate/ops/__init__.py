"""Native operators: how they are built and cached, and the optimizers and I/O made from them.

The names below are resolved when first used; importing this package imports no torch and compiles nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acclimate.lazy import lazy_names

if TYPE_CHECKING:
    from acclimate.ops.adagrad import CPUAdagrad
    from acclimate.ops.adam import CPUAdam, FusedAdam
    from acclimate.ops.aio import AsyncIOHandle
    from acclimate.ops.builder import OpBuilder
    from acclimate.ops.lamb import FusedLamb
    from acclimate.ops.lion import CPULion, FusedLion
    from acclimate.ops.recipe import Source

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
    "CPUAdagrad": "acclimate.ops.adagrad",
    "CPUAdam": "acclimate.ops.adam",
    "CPULion": "acclimate.ops.lion",
    "FusedAdam": "acclimate.ops.adam",
    "FusedLamb": "acclimate.ops.lamb",
    "FusedLion": "acclimate.ops.lion",
    "OpBuilder": "acclimate.ops.builder",
    "Source": "acclimate.ops.recipe",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
