import sys
from types import ModuleType

import torch

from acclimate.ops import OpBuilder

library = torch.library.Library("acme", "DEF")


def scale(x: torch.Tensor) -> torch.Tensor:
    """Three times ``x``; what runs it is in ``scale.by``."""
    out = torch.empty_like(x)
    torch.ops.acme.scale(x, out)
    return out


class ScaleBuilder(OpBuilder):
    name = "acme_scale"

    def sources(self) -> list[str]:
        return ["csrc/scale.cpp"]

    def define(self) -> None:
        library.define("scale(Tensor x, Tensor(a!) out) -> ()")
        library.impl("scale", _plain, "CompositeExplicitAutograd")

    def module(self) -> ModuleType:
        return sys.modules[__name__]


plain_calls: list[int] = []
"""The number of elements of each call that ran on plain torch."""


def _plain(x: torch.Tensor, out: torch.Tensor) -> None:
    plain_calls.append(x.numel())
    torch.mul(x, 3, out=out)
