"""Root-mean-square normalisation in one pass, with this package's own kernel.

``y = x / sqrt(mean(x²) + eps) · weight`` over the last dimension (Zhang and Sennrich 2019, "Root Mean Square
Layer Normalization").
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import ClassVar

import torch

from acclimate.ops import OpBuilder, Source

_SCHEMA = "rms_norm(Tensor x, Tensor weight, float eps=1e-6) -> Tensor"
_definitions: list[torch.library.Library] = []


class RMSNormBuilder(OpBuilder):
    """Builds the kernel; ``load()`` returns this module, whose :func:`rms_norm` then uses the kernel."""

    name: ClassVar[str] = "sim_rms_norm"

    def sources(self) -> list[str | Source]:
        """Returns the path relative to this file's folder, so that the op builds wherever it is installed."""
        return ["csrc/rms_norm.cpp"]

    def define(self) -> None:
        """Defines the schema, the fake kernel, and the plain torch version for devices without the kernel."""
        library = torch.library.Library("acclimate_sim", "DEF")
        library.define(_SCHEMA)
        library.impl("rms_norm", _plain, "CompositeExplicitAutograd")
        torch.library.register_fake("acclimate_sim::rms_norm", _shape_of_result, lib=library)
        _definitions.append(library)  # garbage collection of the library would remove its definitions

    def module(self) -> ModuleType:
        """This module."""
        return sys.modules[__name__]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Normalises the last dimension.

    Args:
        x: float32 or bfloat16, any shape ``(…, n)``.
        weight: of the same dtype, shape ``(n,)``.
        eps: keeps a row of zeros from a division by zero.

    Returns:
        A tensor like ``x``.
    """
    result: torch.Tensor = torch.ops.acclimate_sim.rms_norm(x, weight, eps)
    return result


def _plain(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _shape_of_result(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return torch.empty_like(x)
