"""Whether a failure follows from a dtype that the device lacks, and whether the accelerator claims it."""

from __future__ import annotations

import re
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
_SCALAR_TYPES = {
    torch.float64: "Double", torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16",
    torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte",
    torch.complex32: "ComplexHalf", torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
    torch.bool: "Bool", torch.float8_e4m3fn: "Float8_e4m3fn", torch.float8_e5m2: "Float8_e5m2",
    torch.float8_e4m3fnuz: "Float8_e4m3fnuz", torch.float8_e5m2fnuz: "Float8_e5m2fnuz",
}  # fmt: skip
"""What torch calls dtypes in errors of C++."""


def false_claim(accelerator: Accelerator, error: Exception) -> tuple[str, tuple[str, ...]]:
    """Returns which claim about a dtype is false, if that caused an error, and the methods that make it."""
    dtype, refusal = _refused(accelerator, error)
    if dtype is None or dtype not in _claimed(accelerator):
        return "", ()
    name = str(dtype).removeprefix("torch.")
    methods = tuple(filter(None, (_CLAIMS.get(dtype), "supported_dtypes")))
    claim = f"{methods[0]}() is True" if len(methods) > 1 else f"supported_dtypes() lists {name}"
    return f"{claim}, but the device does not compute in {name}: {refusal}", methods


def lacking(accelerator: Accelerator, error: Exception) -> str:
    """The dtype that the device lacks and does not claim, if that caused an error, as text."""
    dtype, refusal = _refused(accelerator, error)
    if dtype is None or dtype in (torch.float32, *_claimed(accelerator)):
        return ""
    return f"the device has no {str(dtype).removeprefix('torch.')}: {refusal}"


def _claimed(accelerator: Accelerator) -> list[torch.dtype]:
    with suppress(Exception):  # another check reports errors of this call
        return list(accelerator.supported_dtypes())
    return []


def _refused(accelerator: Accelerator, error: Exception) -> tuple[torch.dtype | None, str]:
    """The dtype that an error names and in which the device does not even add, with the error of a sum."""
    said, claimed = describe(error, whole=True), _claimed(accelerator)
    for dtype in dict.fromkeys((*claimed, *_SCALAR_TYPES)):
        short = str(dtype).removeprefix("torch.")
        names = "|".join(filter(None, (f"(?i:{short})", _SCALAR_TYPES.get(dtype))))
        if re.search(rf"(?<![A-Za-z0-9])({names})(?![A-Za-z0-9])", said):
            # torch itself only stores and converts numbers of 8 bits.
            adds = dtype in claimed or not dtype.is_floating_point or dtype.itemsize > 1
            refusal = _refusal(accelerator, dtype, adds)
            if refusal:
                return dtype, refusal
    return None, ""


def _refusal(accelerator: Accelerator, dtype: torch.dtype, adds: bool) -> str:
    """The error of a sum on the device, or only of storing numbers there, if there is one."""
    try:
        numbers = torch.ones(2).to(dtype).to(accelerator.current_device_name())
        (numbers.add(1) if adds else numbers).cpu()
    except Exception as error:  # noqa: BLE001 - each device refuses in its own way
        return describe(error, whole=True)
    return ""
