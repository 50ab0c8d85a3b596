"""Linear layers for few rows at the speed of memory, over plain and quantised weights.

Names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acclimate.host.lazy import lazy_names

if TYPE_CHECKING:
    from acclimate.llm.kernels.formats import GGUF_FORMATS
    from acclimate.llm.kernels.packed_stack import PackedStack
    from acclimate.llm.kernels.packed_weight import PackedWeight

__all__ = ["GGUF_FORMATS", "PackedStack", "PackedWeight"]

_HOMES = {
    "GGUF_FORMATS": "acclimate.llm.kernels.formats",
    "PackedStack": "acclimate.llm.kernels.packed_stack",
    "PackedWeight": "acclimate.llm.kernels.packed_weight",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
