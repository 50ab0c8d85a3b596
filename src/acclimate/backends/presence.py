"""Whether a package is installed, told without importing it."""

from __future__ import annotations

from importlib.util import find_spec


def is_installed(package: str) -> bool:
    """Whether a top-level package could be imported."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # a stand-in in sys.modules has no spec, or its finder fails
        return False
