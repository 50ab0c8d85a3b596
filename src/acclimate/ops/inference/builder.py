"""Builds the native library of the inference ops."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from acclimate.ops.build.builder import OpBuilder


class InferenceBuilder(OpBuilder):
    """``load()`` returns :mod:`acclimate.ops.inference`, with :class:`PackedWeight`, on plain torch."""

    name = "inference"

    def define(self) -> None:
        """Defines the operators."""
        from acclimate.ops.inference import operators

        operators.define()

    def module(self) -> ModuleType:
        """Returns :mod:`acclimate.ops.inference`."""
        # By its name, since the package offers the class that loads this op.
        return import_module("acclimate.ops.inference")


class CPUInferenceBuilder(InferenceBuilder):
    """The same with native kernels for the host."""
