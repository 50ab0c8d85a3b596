"""Lets safetensors load directly to sim.

safetensors has a fixed list of device names, and also takes an index of torch's current accelerator. So this
module passes the index instead of the name ``sim:N``.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch


def register(device_type: str) -> None:
    """Makes ``safe_open(…, device="sim:1")`` and its callers work, if safetensors is installed."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        return
    original = safetensors.safe_open

    @functools.wraps(original)
    def safe_open(filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        return original(filename, framework=framework, device=_index_of_ours(device, device_type), **options)

    # Modules that imported the function earlier hold the old one.
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})  # not getattr(): a lazy module would start importing
        if names.get("safe_open") is original:
            names["safe_open"] = safe_open


def _index_of_ours(device: Any, device_type: str) -> Any:
    if isinstance(device, int):
        return device
    wanted = torch.device(device)
    if wanted.type != device_type:
        return device
    return torch.accelerator.current_device_index() if wanted.index is None else wanted.index
