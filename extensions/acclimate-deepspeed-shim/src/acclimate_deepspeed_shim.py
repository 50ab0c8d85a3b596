"""``import deepspeed`` finds acclimate's names, unless DeepSpeed is installed.

Python imports this module at its start, so it must be fast: it only adds a finder, which waits for the first
``import deepspeed``. The finder comes first in ``sys.meta_path``, since Python would otherwise import any
folder named ``deepspeed`` on its path.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class OnDemand(MetaPathFinder):
    """Installs acclimate's finder at the first import of ``deepspeed``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of acclimate's ``deepspeed``; for all other names ``None``."""
        if fullname != "deepspeed":
            return None
        with contextlib.suppress(ValueError):  # another thread was first
            sys.meta_path.remove(self)  # acclimate adds its own finder
        from acclimate.compat.deepspeed.names import NamesFinder, offer

        return NamesFinder().find_spec(fullname, path, target) if offer() else None


if not any(isinstance(finder, OnDemand) for finder in sys.meta_path):
    sys.meta_path.insert(0, OnDemand())
