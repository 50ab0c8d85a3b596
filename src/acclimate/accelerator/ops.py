"""An accelerator's native operators, found by the names of their builders."""

from __future__ import annotations

import difflib
import functools
import logging
import os
import pkgutil
import shlex
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from acclimate.accelerator.devices import Devices
from acclimate.errors import CompilerNotFoundError, excerpt

CXX_SUFFIXES = (".cpp", ".cc", ".cxx")
"""The suffixes of C++ source files."""

HOST_COMPILERS = ("c++", "g++", "clang++")
"""The C++ compilers looked for on ``PATH``, in this order."""


def host_compiler() -> list[str]:
    """Returns the command of the C++ compiler: ``CXX`` if it is set, else the first compiler on ``PATH``.

    ``CXX`` may hold several words (``ccache g++``). The program is an absolute path.

    Raises:
        CompilerNotFoundError: there is none; the message says where it was looked for.
    """
    text = os.environ.get("CXX", "")
    try:
        chosen = shlex.split(text)
    except ValueError as error:  # an open quotation mark, or nothing after a backslash
        raise CompilerNotFoundError(
            f'CXX is "{excerpt(text)}", which is not a command: {error}. Correct it, or unset it to use the '
            f"first of "
            f"{', '.join(HOST_COMPILERS)}"
        ) from error
    if chosen:
        return [_program(chosen[0], f'CXX is "{excerpt(text)}"'), *chosen[1:]]
    for name in HOST_COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return [os.path.abspath(path)]
    raise CompilerNotFoundError(
        f"there is no C++ compiler: none of {', '.join(HOST_COMPILERS)} is on PATH, and CXX is not set. "
        "Install one (Debian: apt-get install g++)"
    )


def _program(name: str, why: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise CompilerNotFoundError(
            f"{why}, but there is no such program on PATH. Correct it, or unset it to use the first of "
            f"{', '.join(HOST_COMPILERS)}"
        )
    return os.path.abspath(path)


_logger = logging.getLogger("acclimate")


class Ops(Devices):
    """Op builders, compilers and flags."""

    op_builders: ClassVar[Mapping[str, str]] = {
        "AsyncIOBuilder": "acclimate.ops.aio.builder:AsyncIOBuilder",
        "CPUAdagradBuilder": "acclimate.ops.optimizers.builders:CPUAdagradBuilder",
        "CPUAdamBuilder": "acclimate.ops.optimizers.builders:CPUAdamBuilder",
        "CPULionBuilder": "acclimate.ops.optimizers.builders:CPULionBuilder",
        "FusedAdamBuilder": "acclimate.ops.optimizers.builders:TorchFusedAdamBuilder",
        "InferenceBuilder": "acclimate.llm.kernels.builder:InferenceBuilder",
    }
    """This accelerator's op builders, from their names to ``"module:Class"``, imported on demand. The first
    four run on the host, so every accelerator has them; a backend adds its own:
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
        """The class of an op builder, or ``None`` if this accelerator has no such op.

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
        """An op builder, whose ``load()`` returns the native module; ``None`` if this accelerator has no such
        op, which is logged as a warning with the nearest name.

        Delegates to: :meth:`get_op_builder`.
        CPU: as stated.
        CUDA: as stated.
        """
        builder = self.get_op_builder(class_name)
        if builder is None:
            _logger.warning(
                'The %s accelerator has no op builder "%s", so create_op_builder() returns None. %s',
                self.name,
                excerpt(class_name),
                self._advice_on_builders(class_name),
            )
            return None
        # Our builders take the accelerator; builders written for DeepSpeed take no argument.
        bind = getattr(builder, "for_accelerator", None)
        return bind(self) if bind is not None else builder()

    def _advice_on_builders(self, class_name: str) -> str:
        word = class_name.replace("_", "").lower().removesuffix("builder")
        shortened = {name.removesuffix("Builder").lower(): name for name in self.op_builders}
        near = [name for short, name in shortened.items() if word and word in short]
        near = near or [shortened[short] for short in difflib.get_close_matches(word, shortened, n=1)]
        return f'Did you mean "{near[0]}"?' if near else f"It has {', '.join(sorted(self.op_builders))}."

    def op_compiler(self, suffix: str = ".cpp") -> list[str]:
        """The command that compiles native source of one kind: a program's absolute path and its fixed
        arguments.

        Args:
            suffix: the suffix of the source's file name. The C++ compiler also links the library.

        Delegates to: no call of torch.
        CPU: ``CXX``, else the first of ``c++``, ``g++``, ``clang++`` on ``PATH``.
        CUDA: the same, and for ``.cu`` the toolkit's ``nvcc``.

        Raises:
            CompilerNotFoundError: there is none; the message says where it was looked for.
        """
        if suffix not in CXX_SUFFIXES:
            raise CompilerNotFoundError(
                f'the {self.name} accelerator has no compiler for "{suffix}" files. '
                f"C++ sources of an op builder must end in one of {', '.join(CXX_SUFFIXES)}"
            )
        return host_compiler()

    def op_compile_flags(self, suffix: str = ".cpp", portable: bool = False) -> list[str]:
        """This accelerator's flags for native source of one kind. They follow the builder's common flags
        (optimisation, language standard, torch's headers) and precede an op's own.

        Args:
            suffix: the suffix of the source's file name.
            portable: for all devices of this kind, not only for those present. Machines with a device use
                such a library, too.

        Delegates to: no call of torch.
        CPU: position-independent code that exports only marked symbols.
        CUDA: the same, and for ``.cu`` the architectures to compile for: ``TORCH_CUDA_ARCH_LIST``, else
            those of the GPUs present, else all common ones that the toolkit knows.
        """
        return ["-fPIC", "-fvisibility=hidden"]

    def op_include_paths(self) -> list[str]:
        """Folders of headers that native source for this accelerator needs besides torch's.

        Delegates to: no call of torch.
        CPU: none.
        CUDA: the toolkit's, if one is found.
        """
        return []

    def op_link_flags(self, suffixes: Collection[str] = (".cpp",)) -> list[str]:
        """Flags for linking this accelerator's native code, besides those for torch's host library.

        Args:
            suffixes: the suffixes of the sources.

        Delegates to: no call of torch.
        CPU: none.
        CUDA: for ``.cu`` source, the toolkit's static runtime and torch's CUDA library.
        """
        return []

    def toolkit_version(self) -> str | None:
        """The version of the vendor's software below torch, as the vendor writes it; ``None`` if there is
        none or it is unknown.

        Delegates to: ``torch.version.<device>``.
        CPU: ``None``.
        CUDA: the CUDA version that torch was built with, such as ``"13.0"``; on ROCm, HIP's.
        """
        version = getattr(torch.version, self.device_type, None)
        return str(version) if version is not None else None

    def build_extension(self) -> type[Any]:
        """The setuptools command that builds native extensions ahead of time: those of an op builder's
        ``builder()``, and torch's.

        Delegates to: ``torch.utils.cpp_extension.BuildExtension``, its base class.
        CPU: as stated.
        CUDA: as stated.
        """
        return _build_command()


@functools.cache
def _build_command() -> type[Any]:
    from torch.utils.cpp_extension import BuildExtension  # imports setuptools, which is slow

    class BuildOps(BuildExtension):
        """torch's ``build_ext`` command, which also builds the extensions of op builders."""

        def build_extension(self, ext: Any) -> None:
            """Builds one extension: with its own ``build_to(path)`` if it has one, else with torch."""
            build_to = getattr(ext, "build_to", None)
            if build_to is None:
                super().build_extension(ext)
                return
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            build_to(target)

    return BuildOps
