"""Native operators of an accelerator, found by the name of their builder."""

from __future__ import annotations

import pkgutil
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch

from acclimate.accelerator.compilers import CXX_SUFFIXES, host_compiler
from acclimate.accelerator.devices import Devices
from acclimate.errors import CompilerNotFoundError


class Ops(Devices):
    """Op builders and what they build with."""

    op_builders: ClassVar[Mapping[str, str]] = {
        "AsyncIOBuilder": "acclimate.ops.aio.builder:AsyncIOBuilder",
        "CPUAdagradBuilder": "acclimate.ops.optimizers.adagrad.builder:CPUAdagradBuilder",
        "CPUAdamBuilder": "acclimate.ops.optimizers.adam.builder:CPUAdamBuilder",
        "CPULionBuilder": "acclimate.ops.optimizers.lion.builder:CPULionBuilder",
        "FusedAdamBuilder": "acclimate.ops.optimizers.adam.builder:TorchFusedAdamBuilder",
    }
    """Where this accelerator's op builders are: builder name to ``"module:Class"``, imported when asked
    for. The first four run on the host, which every accelerator has; a backend adds its own:
    ``{**Accelerator.op_builders, "MyBuilder": "my_package.my_op:MyBuilder"}``.

    CPU: the host's, and fused optimizers.
    CUDA: the host's, and fused optimizers in the GPU's own code.
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
        builder: type[Any] = pkgutil.resolve_name(target)
        return builder

    def create_op_builder(self, class_name: str) -> Any | None:
        """An op builder, on which ``load()`` gives the native module; ``None`` where this accelerator
        has no such op.

        Delegates to: :meth:`get_op_builder`.
        CPU: as stated.
        CUDA: as stated.
        """
        builder = self.get_op_builder(class_name)
        if builder is None:
            return None
        # Our builders take the accelerator they build for; those written for DeepSpeed take nothing.
        bind = getattr(builder, "for_accelerator", None)
        return bind(self) if bind is not None else builder()

    def op_compiler(self, suffix: str = ".cpp") -> list[str]:
        """The command that compiles native source of one kind: a program's full path, then its fixed
        arguments.

        Args:
            suffix: of the source's file name. C++'s compiler links the library too.

        Delegates to: nothing of torch's.
        CPU: ``CXX``, else the first of ``c++``, ``g++``, ``clang++`` on ``PATH``.
        CUDA: the same, and for ``.cu`` the toolkit's ``nvcc``.

        Raises:
            CompilerNotFoundError: there is none; the message says where it was looked for.
        """
        if suffix not in CXX_SUFFIXES:
            raise CompilerNotFoundError(
                f'the {self.name} accelerator names no compiler for "{suffix}" files. '
                f"An op builder's C++ sources end in one of {', '.join(CXX_SUFFIXES)}"
            )
        return host_compiler()

    def op_compile_flags(self, suffix: str = ".cpp", portable: bool = False) -> list[str]:
        """Flags with which this accelerator's native source of one kind is compiled, after the builder's
        common ones (optimisation, language standard, torch's headers) and before an op's own.

        Args:
            suffix: of the source's file name.
            portable: for all devices of this kind, not only for those present. A library made so, where
                there was no device, is used where there is one.

        Delegates to: nothing of torch's.
        CPU: position-independent code that exports only what is marked.
        CUDA: the same, and for ``.cu`` the architectures to compile for: ``TORCH_CUDA_ARCH_LIST``, else
            those of the GPUs present, else all common ones that the toolkit knows.
        """
        return ["-fPIC", "-fvisibility=hidden"]

    def op_include_paths(self) -> list[str]:
        """Folders of headers that native source for this accelerator needs besides torch's.

        Delegates to: nothing of torch's.
        CPU: none.
        CUDA: the toolkit's, where one is found.
        """
        return []

    def op_link_flags(self, suffixes: Collection[str] = (".cpp",)) -> list[str]:
        """Flags with which a library of this accelerator's native code is linked, besides torch's host
        library.

        Args:
            suffixes: of the sources in it.

        Delegates to: nothing of torch's.
        CPU: none.
        CUDA: where there is ``.cu`` source, the static runtime of the toolkit, and torch's CUDA library.
        """
        return []

    def toolkit_version(self) -> str | None:
        """The version of the vendor's software that torch and native code for this device stand on, as
        the vendor writes it; ``None`` where there is none or it cannot be told.

        Delegates to: ``torch.version.<device>``.
        CPU: ``None``.
        CUDA: of the CUDA that torch was built with, such as ``"13.0"``; on ROCm, of HIP.
        """
        version = getattr(torch.version, self.device_type, None)
        return str(version) if version is not None else None

    def build_extension(self) -> type[Any]:
        """The setuptools command that builds native extensions ahead of time: those that an op builder's
        ``builder()`` gives, and any other of torch's.

        Delegates to: ``torch.utils.cpp_extension.BuildExtension``, which it is a kind of.
        CPU: as stated.
        CUDA: as stated.
        """
        from acclimate.accelerator.setuptools_command import BuildOps  # brings setuptools, which is slow

        return BuildOps
