"""Linear layers for few rows at the speed of memory, over plain and quantised weights.

Names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acclimate.host.lazy import lazy_names

if TYPE_CHECKING:
    from acclimate.llm.kernels.packed_weight import PackedWeight
    from acclimate.llm.kernels.schemes import GGUF_SCHEMES

__all__ = ["GGUF_SCHEMES", "PackedWeight"]

_HOMES = {
    "GGUF_SCHEMES": "acclimate.llm.kernels.schemes",
    "PackedWeight": "acclimate.llm.kernels.packed_weight",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
