"""Linear layers for few rows at the speed of memory, over plain and quantised weights.

Names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acclimate.lazy import lazy_names

if TYPE_CHECKING:
    from acclimate.ops.inference.packed_weight import PackedWeight
    from acclimate.ops.inference.schemes import GGUF_SCHEMES

__all__ = ["GGUF_SCHEMES", "PackedWeight"]

_HOMES = {
    "GGUF_SCHEMES": "acclimate.ops.inference.schemes",
    "PackedWeight": "acclimate.ops.inference.packed_weight",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
