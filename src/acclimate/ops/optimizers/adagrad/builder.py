"""Builder of the Adagrad op."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.build.recipe import Source
from acclimate.ops.optimizers.adam.builder import HOST_FLAGS


class CPUAdagradBuilder(OpBuilder):
    """Adagrad on the host; ``load()`` gives DeepSpeed's ``create_adagrad``, ``adagrad_update``, …"""

    name: ClassVar[str] = "cpu_adagrad"

    def sources(self) -> list[str | Source]:
        """The host's kernels, all instruction sets in one file."""
        return ["csrc/adagrad.cpp"]

    def cxx_args(self) -> list[str]:
        """What keeps every instruction set to the same bits."""
        return list(HOST_FLAGS)

    def define(self) -> None:
        """Defines ``acclimate::adagrad_``."""
        from acclimate.ops.optimizers.adagrad import schema

        schema.define()

    def module(self) -> ModuleType:
        """DeepSpeed's functions of its op of this name."""
        from acclimate.ops.optimizers.adagrad import cpu_module

        return cpu_module
