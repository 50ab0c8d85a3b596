"""``import deepspeed`` finds acclimate's names, unless DeepSpeed is installed.

Python imports this at its start. It must cost nothing there: it only adds a finder, which is asked last, and
so only for a ``deepspeed`` that nobody has.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Last(MetaPathFinder):
    """Offers acclimate's names when the first of them is wanted."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of acclimate's ``deepspeed``; for all other names ``None``."""
        if fullname != "deepspeed":
            return None
        from acclimate.compat.deepspeed.names import NamesFinder, offer

        return NamesFinder().find_spec(fullname, path, target) if offer() else None


if not any(isinstance(finder, Last) for finder in sys.meta_path):
    sys.meta_path.append(Last())
