"""Root-mean-square normalisation in one pass, with a kernel of this package's own.

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
    """Builds the kernel; ``load()`` gives this module, whose :func:`rms_norm` then runs on it."""

    name: ClassVar[str] = "sim_rms_norm"

    def sources(self) -> list[str | Source]:
        """Relative to this file's folder, so an op builds from wherever its package is installed."""
        return ["csrc/rms_norm.cpp"]

    def define(self) -> None:
        """The schema, the shape for tracing, and the plain version for devices without the kernel."""
        library = torch.library.Library("acclimate_sim", "DEF")
        library.define(_SCHEMA)
        library.impl("rms_norm", _plain, "CompositeExplicitAutograd")
        torch.library.register_fake("acclimate_sim::rms_norm", _shape_of_result, lib=library)
        _definitions.append(library)  # a library that is collected takes its definitions with it

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
