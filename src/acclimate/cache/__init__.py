"""The user's cache folder. A folder in it appears complete, built by one process, or not at all."""

from __future__ import annotations

from acclimate.cache.folder import cache_root
from acclimate.cache.publish import full_disk_error, publish_once

__all__ = ["cache_root", "full_disk_error", "publish_once"]
