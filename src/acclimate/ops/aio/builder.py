"""Builds the native library of asynchronous I/O."""

from __future__ import annotations

import sys
from types import ModuleType

from acclimate.ops.aio import functions, schema
from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.build.recipe import Source


class AsyncIOBuilder(OpBuilder):
    """``load()`` gives DeepSpeed's ``aio_handle``, ``aio_read``, ``aio_write`` and ``deepspeed_memcpy``.

    The library needs Linux and nothing else: io_uring and Linux AIO are called by number, without liburing
    or libaio. Without it the same functions run on a pool of Python threads.
    """

    name = "async_io"

    def sources(self) -> list[str | Source]:
        """One file; the rest are its headers."""
        return ["csrc/async_io.cpp"]

    def cxx_args(self) -> list[str]:
        """Threads; and nothing visible from outside, as two builds may be loaded at once."""
        return ["-pthread", "-fvisibility=hidden"]

    def link_args(self) -> list[str]:
        """Threads, which older C libraries keep in a library of their own."""
        return ["-pthread"]

    def incompatibility(self) -> str | None:
        """Any system but Linux, or no compiler."""
        if not sys.platform.startswith("linux"):
            return f"io_uring and Linux AIO are Linux's, and this is {sys.platform}"
        return super().incompatibility()

    def define(self) -> None:
        """The operators that the library implements."""
        schema.define()

    def module(self) -> ModuleType:
        """:mod:`acclimate.ops.aio.functions`."""
        return functions
