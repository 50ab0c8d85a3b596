"""How the native library of asynchronous I/O is built and loaded."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

import torch

from acclimate.ops import registry
from acclimate.ops.build.builder import OpBuilder
from acclimate.ops.build.recipe import Source

# These operators have no fallback in torch: they start, feed and stop threads. Without the library,
# engines.py uses an engine written in Python.
_SCHEMAS = (
    "aio_start(int way, int block_bytes, int depth, bool single_submit, int workers) -> int",
    "aio_submit(int engine, int ticket, Tensor(a!) buffer, int length, int fd, int direct_fd, int offset, "
    "bool writes) -> int",
    "aio_wait(int engine, int ticket, int timeout_ms) -> (int, int, int)",
    "aio_forget(int engine, int ticket) -> ()",
    "aio_stop(int engine) -> ()",
    "aio_abandon(int engine) -> ()",
)


class AsyncIOBuilder(OpBuilder):
    """``load()`` returns DeepSpeed's ``aio_handle``, ``aio_read``, ``aio_write`` and ``deepspeed_memcpy``.

    Without the library the same functions use a pool of Python threads. The library needs only Linux: it
    calls io_uring and Linux AIO as system calls, without liburing or libaio.
    """

    name = "async_io"

    def sources(self) -> list[str | Source]:
        return ["csrc/async_io.cpp"]

    def cxx_args(self) -> list[str]:
        return ["-pthread", "-fvisibility=hidden"]  # hidden, since two builds may be loaded at once

    def link_args(self) -> list[str]:
        return ["-pthread"]  # which older C libraries keep in a separate library

    def incompatibility(self) -> str | None:
        if not sys.platform.startswith("linux"):
            return f"io_uring and Linux AIO need Linux, and this is {sys.platform}"
        return super().incompatibility()

    def define(self) -> None:
        registry.define(_SCHEMAS)

    def module(self) -> ModuleType:
        return import_module("acclimate.ops.aio.handle")  # by name: its handles load this library


def load_native() -> bool:
    """Loads the library, if it can be built; returns whether it implements the operators."""
    AsyncIOBuilder().load()
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key("acclimate::aio_start", "CompositeExplicitAutograd")
    )
