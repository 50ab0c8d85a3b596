"""Reads files into tensors and writes tensors to files, bypassing the page cache, many blocks at a time."""

from __future__ import annotations

from acclimate.ops.aio.handle import AsyncIOHandle

__all__ = ["AsyncIOHandle"]
