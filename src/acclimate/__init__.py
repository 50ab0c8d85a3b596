"""acclimate: the same PyTorch LLM code, training and inference, on any accelerator.

    from acclimate import get_accelerator

    acc = get_accelerator()
    x = torch.empty(shape, device=acc.current_device_name())

Importing this package imports neither torch nor a vendor's package; names are resolved on first use.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from acclimate.host.lazy import lazy_names

if TYPE_CHECKING:
    from acclimate.accelerator import Accelerator
    from acclimate.backends.record import Backend
    from acclimate.comm import init_distributed
    from acclimate.errors import AcclimateError
    from acclimate.llm import generate, init_inference
    from acclimate.selection import (
        get_accelerator,
        is_current_accelerator_supported,
        set_accelerator,
        use_accelerator,
    )

__version__ = "0.1.0"

__all__ = [
    "Accelerator",
    "AcclimateError",
    "Backend",
    "generate",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "is_current_accelerator_supported",
    "set_accelerator",
    "use_accelerator",
]

_HOMES = {
    "Accelerator": "acclimate.accelerator",
    "AcclimateError": "acclimate.errors",
    "Backend": "acclimate.backends.record",
    "generate": "acclimate.llm",
    "get_accelerator": "acclimate.selection",
    "init_distributed": "acclimate.comm",
    "init_inference": "acclimate.llm",
    "is_current_accelerator_supported": "acclimate.selection",
    "set_accelerator": "acclimate.selection",
    "use_accelerator": "acclimate.selection",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)

if os.environ.get("ACCLIMATE_DEEPSPEED") == "1":
    # By name, since compat/ is above all that is named here.
    from pkgutil import resolve_name

    resolve_name("acclimate.compat.deepspeed:start")()
