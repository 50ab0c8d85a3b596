"""AutoTP: splits any model over ranks.

torch is imported only when a name is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acclimate.host.lazy import lazy_names

if TYPE_CHECKING:
    from acclimate.llm.split.apply import apply_plan, gather, gather_tensors
    from acclimate.llm.split.plan import Plan, Split, shard
    from acclimate.llm.split.planning.make_plan import make_plan
    from acclimate.llm.split.training import clip_grad_norm

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
    "Plan": "acclimate.llm.split.plan",
    "Split": "acclimate.llm.split.plan",
    "apply_plan": "acclimate.llm.split.apply",
    "clip_grad_norm": "acclimate.llm.split.training",
    "gather": "acclimate.llm.split.apply",
    "gather_tensors": "acclimate.llm.split.apply",
    "make_plan": "acclimate.llm.split.planning.make_plan",
    "shard": "acclimate.llm.split.plan",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
