"""Whether a failure follows from a dtype that the accelerator claims and the device lacks."""

from __future__ import annotations

from contextlib import suppress

import torch

from acclimate.accelerator import Accelerator
from acclimate.imports import describe

_CLAIMS = {
    torch.bfloat16: "is_bf16_supported",
    torch.float16: "is_fp16_supported",
    torch.float64: "is_fp64_supported",
}
"""For each dtype, the method that says whether the device supports it."""


def false_claim(accelerator: Accelerator, error: Exception) -> tuple[str, tuple[str, ...]]:
    """Returns which claim about a dtype is false, if that caused an error, and the methods that make it."""
    said = describe(error, whole=True).lower()
    claimed: list[torch.dtype] = []
    with suppress(Exception):  # another check reports errors of these calls
        claimed = list(accelerator.supported_dtypes())
    for dtype in claimed:
        name = str(dtype).removeprefix("torch.")
        if name not in said or not (refusal := _refusal(accelerator, dtype)):
            continue
        methods = tuple(filter(None, (_CLAIMS.get(dtype), "supported_dtypes")))
        claim = f"{methods[0]}() is True" if len(methods) > 1 else f"supported_dtypes() lists {name}"
        return f"{claim}, but the device does not compute in {name}: {refusal}", methods
    return "", ()


def _refusal(accelerator: Accelerator, dtype: torch.dtype) -> str:
    """The error of a sum on the device, if there is one."""
    try:
        torch.ones(2, dtype=dtype, device=accelerator.current_device_name()).add(1).cpu()
    except Exception as error:  # noqa: BLE001 - each device refuses in its own way
        return describe(error, whole=True)
    return ""
