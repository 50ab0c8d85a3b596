"""How the native library of asynchronous I/O is built and loaded."""

from __future__ import annotations

import sys
from types import ModuleType

from acclimate.ops.aio import schema
from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.build.recipe import Source


class AsyncIOLibrary(OpBuilder):
    """The native library, without the functions that use it; the engines load it.

    It needs only Linux: it calls io_uring and Linux AIO as system calls, without liburing or libaio.
    """

    name = "async_io"

    def sources(self) -> list[str | Source]:
        """Returns one file; the others are its headers."""
        return ["csrc/async_io.cpp"]

    def cxx_args(self) -> list[str]:
        """Returns flags for threads and hidden symbols, since two builds may be loaded at once."""
        return ["-pthread", "-fvisibility=hidden"]

    def link_args(self) -> list[str]:
        """Returns the flag for threads, which are a separate library in older C libraries."""
        return ["-pthread"]

    def incompatibility(self) -> str | None:
        """Returns why it cannot be built: the system is not Linux, or there is no compiler."""
        if not sys.platform.startswith("linux"):
            return f"io_uring and Linux AIO need Linux, and this is {sys.platform}"
        return super().incompatibility()

    def define(self) -> None:
        """Defines the operators that the library implements."""
        schema.define()

    def module(self) -> ModuleType:
        """Returns :mod:`acclimate.ops.aio.schema`, which says whether the operators are native."""
        return schema
