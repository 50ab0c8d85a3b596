"""AutoTP: splits any model over ranks.

torch is imported only when a name is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acclimate.lazy import lazy_names

if TYPE_CHECKING:
    from acclimate.parallel.split import Plan, Split, shard

__all__ = ["Plan", "Split", "shard"]

_HOMES = {
    "Plan": "acclimate.parallel.split",
    "Split": "acclimate.parallel.split",
    "shard": "acclimate.parallel.split",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
