"""The communication backend of devices for which ``torch.distributed`` has none."""

from __future__ import annotations

import pkgutil

import torch


def staged_for(device_type: str) -> str:
    """Returns ``"staged"``, and registers it with ``torch.distributed`` for a device type."""
    if not torch.distributed.is_available():
        return "gloo"
    pkgutil.resolve_name("acclimate.comm.staged:register")(device_type)
    return "staged"
