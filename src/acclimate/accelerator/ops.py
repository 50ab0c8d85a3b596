"""Native operators of an accelerator, found by the name of their builder."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

from acclimate.accelerator.devices import Devices


class Ops(Devices):
    """Op builders and what they build with."""

    op_builders: ClassVar[Mapping[str, str]] = {}
    """Where this accelerator's op builders are: builder name to ``"module:Class"``, imported when asked
    for. A backend adds its own to those it shares with others.

    CPU: the host's ops.
    CUDA: the host's and the GPU's.
    """

    op_builder_package: ClassVar[str] = "acclimate.ops"
    """The Python package that holds this accelerator's op builders.

    CPU: ``"acclimate.ops"``.
    CUDA: ``"acclimate.ops"``.
    """

    def op_builder_dir(self) -> str:
        """The dotted name of the package that holds this accelerator's op builders.

        Delegates to: :attr:`op_builder_package`.
        CPU: ``"acclimate.ops"``.
        CUDA: ``"acclimate.ops"``.
        """
        return self.op_builder_package

    def get_op_builder(self, class_name: str) -> type[Any] | None:
        """The class of an op builder, or ``None`` where this accelerator has no such op.

        Delegates to: :attr:`op_builders`.
        CPU: as stated.
        CUDA: as stated.
        """
        target = self.op_builders.get(class_name)
        if target is None:
            return None
        module, _, attribute = target.partition(":")
        builder: type[Any] = getattr(importlib.import_module(module), attribute)
        return builder

    def create_op_builder(self, class_name: str) -> Any | None:
        """An op builder, on which ``load()`` gives the native module; ``None`` where this accelerator
        has no such op.

        Delegates to: :meth:`get_op_builder`.
        CPU: as stated.
        CUDA: as stated.
        """
        builder = self.get_op_builder(class_name)
        return builder() if builder is not None else None

    def build_extension(self) -> type[Any]:
        """The setuptools command that builds native extensions ahead of time.

        Delegates to: ``torch.utils.cpp_extension.BuildExtension``.
        CPU: as stated.
        CUDA: as stated.
        """
        from torch.utils.cpp_extension import BuildExtension  # imports setuptools, which is slow

        return BuildExtension
