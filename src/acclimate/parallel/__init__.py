"""AutoTP: splits any model over ranks.

torch is imported only when a name is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acclimate.lazy import lazy_names

if TYPE_CHECKING:
    from acclimate.parallel.apply import apply_plan, gather
    from acclimate.parallel.planning.make_plan import make_plan
    from acclimate.parallel.split import Plan, Split, shard

__all__ = ["Plan", "Split", "apply_plan", "gather", "make_plan", "shard"]

_HOMES = {
    "Plan": "acclimate.parallel.split",
    "Split": "acclimate.parallel.split",
    "apply_plan": "acclimate.parallel.apply",
    "gather": "acclimate.parallel.apply",
    "make_plan": "acclimate.parallel.planning.make_plan",
    "shard": "acclimate.parallel.split",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
