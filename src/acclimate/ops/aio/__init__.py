"""Files to tensors and back, past the page cache and many blocks at a time."""

from __future__ import annotations

from acclimate.ops.aio.handle import AsyncIOHandle

__all__ = ["AsyncIOHandle"]
