"""``import deepspeed`` finds acclimate's names, unless DeepSpeed is installed.

Python imports this at its start. It must cost nothing there: it only adds a finder, which waits for the first
``import deepspeed``. It is asked first, since Python would take any folder of that name on its path.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class OnDemand(MetaPathFinder):
    """Offers acclimate's names when the first of them is wanted."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of acclimate's ``deepspeed``; for all other names ``None``."""
        if fullname != "deepspeed":
            return None
        with contextlib.suppress(ValueError):  # another thread was first
            sys.meta_path.remove(self)  # acclimate adds a finder of its own
        from acclimate.compat.deepspeed.names import NamesFinder, offer

        return NamesFinder().find_spec(fullname, path, target) if offer() else None


if not any(isinstance(finder, OnDemand) for finder in sys.meta_path):
    sys.meta_path.insert(0, OnDemand())
