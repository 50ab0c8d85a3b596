"""Builds asynchronous I/O with DeepSpeed's functions."""

from __future__ import annotations

from types import ModuleType

from acclimate.ops.aio import functions
from acclimate.ops.aio.library import AsyncIOLibrary


class AsyncIOBuilder(AsyncIOLibrary):
    """``load()`` returns DeepSpeed's ``aio_handle``, ``aio_read``, ``aio_write`` and ``deepspeed_memcpy``.

    Without the library the same functions use a pool of Python threads.
    """

    def module(self) -> ModuleType:
        """Returns :mod:`acclimate.ops.aio.functions`."""
        return functions
