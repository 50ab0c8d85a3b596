"""The user's cache folder, and how a folder is published in it: whole, once, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from acclimate.cache.publish import full_disk_error, publish_once

__all__ = ["cache_root", "full_disk_error", "publish_once"]


def cache_root() -> Path:
    """The folder all of acclimate's cached files live under; not created here.

    ``ACCLIMATE_CACHE``, else ``$XDG_CACHE_HOME/acclimate``, else ``~/.cache/acclimate``.
    """
    if chosen := os.environ.get("ACCLIMATE_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "acclimate"
