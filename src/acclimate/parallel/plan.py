"""Makes a plan: which module is split how, from the user, the model's own plan or its structure."""

from __future__ import annotations

from acclimate.parallel.split import Change, Plan, Split, shard

__all__ = ["Change", "Plan", "Split", "shard"]
