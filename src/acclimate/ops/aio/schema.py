"""The native operators of asynchronous I/O, as torch's dispatcher knows them.

They have no plain implementation of their own: they start, feed and stop threads, so without the native
library :mod:`acclimate.ops.aio.engines` chooses an engine written in Python instead.
"""

from __future__ import annotations

import functools

import torch

_SCHEMAS = (
    "aio_start(int way, int block_bytes, int depth, bool single_submit, int workers) -> int",
    "aio_submit(int engine, Tensor(a!) buffer, int length, int fd, int direct_fd, int offset, bool writes)"
    " -> int",
    "aio_wait(int engine, int ticket, int timeout_ms) -> (int, int, int)",
    "aio_stop(int engine) -> ()",
    "aio_abandon(int engine) -> ()",
)

_library: torch.library.Library | None = None


@functools.cache
def define() -> None:
    """Defines the operators' schemas, once per process."""
    global _library
    _library = torch.library.Library("acclimate", "FRAGMENT")
    for schema in _SCHEMAS:
        _library.define(schema)


def is_native() -> bool:
    """Whether a native library implements the operators in this process."""
    define()
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key("acclimate::aio_start", "CompositeExplicitAutograd")
    )
