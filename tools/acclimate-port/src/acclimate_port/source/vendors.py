"""The device types other than CUDA and the CPU, and the words that programs use for them.

A test compares this table with acclimate's records of accelerators, which this package must not import.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Vendor:
    """A device type that programs may have their own code for."""

    device_type: str
    words: tuple[str, ...] = ()
    """Other words for it in names and strings."""
    packages: tuple[str, ...] = ()
    """Packages whose names stand for it in flags: ``is_torch_npu_available``."""
    is_backend: bool = True
    """Whether acclimate has a record for it; it supports the others through torch alone."""
    lacks_streams: bool = False
    """Whether torch has neither streams nor memory statistics for it."""


VENDORS = (
    Vendor("mps", lacks_streams=True),
    Vendor("xpu", packages=("torch_xpu",)),
    Vendor("npu", packages=("torch_npu",)),
    Vendor("hpu"),
    Vendor("mlu"),
    Vendor("sdaa"),
    Vendor("musa", is_backend=False),
    Vendor("xla", words=("tpu",), is_backend=False),
)

_TYPE_OF = {word: vendor.device_type for vendor in VENDORS for word in (vendor.device_type, *vendor.words)}
OTHER_KINDS = tuple(_TYPE_OF)
"""Words that programs use for devices other than CUDA and the CPU."""
FLAG_WORDS = (*OTHER_KINDS, *(package for vendor in VENDORS for package in vendor.packages))
"""Words that tell one vendor's flag from another's: ``is_npu_available``."""
OWN_WORDS = {
    *("ascend", "maca", "metax", "camb", "cambricon", "iluvatar", "corex", "enflame", "gcu", "kunlun"),
    *("kunlunxin", "biren", "dcu", "hygon", "mthreads", "moorethreads", "rocm", "hip", "amd", "nvidia"),
    *("metal", "opencl", "onnx", "openvino", "coreml", "tensorrt", "directml", "triton"),
}
"""Words that programs use for devices or backends, and that are no device types of torch."""
WITHOUT_STREAMS = tuple(vendor.device_type for vendor in VENDORS if vendor.lacks_streams)
"""The device types for which torch has neither streams nor memory statistics."""

_KINDS = re.compile(
    rf"(?<![A-Za-z])({'|'.join(OTHER_KINDS)})(?![A-Za-z])"
    rf"|(?:(?<=[a-z])|(?<![A-Za-z]))({'|'.join(OTHER_KINDS).upper()})(?![A-Za-z])"
)


def kinds_in(text: str) -> list[str]:
    """The device types other than CUDA and the CPU that a name or an expression contains."""
    return [_TYPE_OF[match[0].lower()] for match in _KINDS.finditer(text)]
