"""AutoTP: splits any model over ranks.

torch is imported only when a name is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acclimate.lazy import lazy_names

if TYPE_CHECKING:
    from acclimate.parallel.apply import apply_plan, gather, gather_tensors
    from acclimate.parallel.plan import Plan, Split, shard
    from acclimate.parallel.planning.make_plan import make_plan
    from acclimate.parallel.training import clip_grad_norm

__all__ = [
    "Plan",
    "Split",
    "apply_plan",
    "clip_grad_norm",
    "gather",
    "gather_tensors",
    "make_plan",
    "shard",
]

_HOMES = {
    "Plan": "acclimate.parallel.plan",
    "Split": "acclimate.parallel.plan",
    "apply_plan": "acclimate.parallel.apply",
    "clip_grad_norm": "acclimate.parallel.training",
    "gather": "acclimate.parallel.apply",
    "gather_tensors": "acclimate.parallel.apply",
    "make_plan": "acclimate.parallel.planning.make_plan",
    "shard": "acclimate.parallel.plan",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
