"""The schemas of the native operators of asynchronous I/O.

They have no fallback in torch: they start, feed and stop threads. Without the native library,
:mod:`acclimate.ops.aio.engines` uses an engine written in Python.
"""

from __future__ import annotations

import torch

from acclimate.ops import registry

_SCHEMAS = (
    "aio_start(int way, int block_bytes, int depth, bool single_submit, int workers) -> int",
    "aio_submit(int engine, int ticket, Tensor(a!) buffer, int length, int fd, int direct_fd, int offset, "
    "bool writes) -> int",
    "aio_wait(int engine, int ticket, int timeout_ms) -> (int, int, int)",
    "aio_forget(int engine, int ticket) -> ()",
    "aio_stop(int engine) -> ()",
    "aio_abandon(int engine) -> ()",
)


def define() -> None:
    """Defines the operators' schemas, once per process."""
    registry.define(_SCHEMAS)


def is_native() -> bool:
    """Whether a native library implements the operators in this process."""
    define()
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key("acclimate::aio_start", "CompositeExplicitAutograd")
    )
