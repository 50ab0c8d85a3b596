"""Faults planted in the operators of the host, which nothing but known results shows."""

# ruff: noqa: RUF012

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate.backends.cpu import CPUAccelerator


class _WithKernels(CPUAccelerator):
    """Replaces operators of the host until :meth:`uninstall`."""

    kernels: dict[str, Callable[..., Any]]

    def __init__(self) -> None:
        super().__init__()
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced
            for name, kernel in self.kernels.items():
                self._library.impl(name, kernel, "CPU")

    def uninstall(self) -> None:
        """Puts the host's own operators back."""
        self._library._destroy()


class LerpStaysBetween(_WithKernels):
    """lerp with a weight beyond 0 and 1 stays between its numbers."""

    kernels = {"lerp.Scalar": lambda a, b, weight: a + (b - a) * min(max(weight, 0), 1)}


class SumOfNothingIsNaN(_WithKernels):
    """logaddexp of two minus infinities is NaN."""

    kernels = {"logaddexp": lambda a, b: torch.maximum(a, b) + torch.log1p(torch.exp(-(a - b).abs()))}


class PutsTheLast(_WithKernels):
    """put(accumulate=True) keeps one of several numbers for a place."""

    @staticmethod
    def _put(
        x: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False
    ) -> torch.Tensor:
        x.view(-1)[index.flatten()] = source.flatten()
        return x

    kernels = {"put_": _put}


class UpperEdgeIsOutside(_WithKernels):
    """histc leaves out numbers that equal the upper edge."""

    @staticmethod
    def _histc(x: torch.Tensor, bins: int = 100, least: float = 0, most: float = 0) -> torch.Tensor:
        if least == most:
            least, most = float(x.min()), float(x.max())
        inside = x[(x >= least) & (x < most)]
        places = ((inside - least) * bins / (most - least)).long()
        return places.bincount(minlength=bins).to(x.dtype)

    kernels = {"histc": _histc}


class BetaIsOne(_WithKernels):
    """addmv adds its first input whole, whatever beta is."""

    kernels = {
        "addmv": lambda x, a, b, beta=1, alpha=1: (x if beta else 0) + alpha * (a * b).sum(1),
    }


class CopiesInOrder(_WithKernels):
    """index_copy takes the places in ascending order."""

    @staticmethod
    def _copy(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        result = x.clone()
        result.movedim(dim, 0)[index.sort().values] = source.movedim(dim, 0)
        return result

    kernels = {"index_copy": _copy}


class CornersAreNeverAligned(_WithKernels):
    """interpolate ignores align_corners."""

    @staticmethod
    def _linear(x: torch.Tensor, size: list[int], corners: bool, scale: float | None = None) -> torch.Tensor:
        length, new = x.shape[-1], size[0]
        places = ((torch.arange(new) + 0.5) * length / new - 0.5).clamp(0, length - 1)
        left = places.long()
        right, share = (left + 1).clamp(max=length - 1), (places - left).to(x.dtype)
        return x[..., left] * (1 - share) + x[..., right] * share

    kernels = {"upsample_linear1d": _linear}


class EigenvaluesOfTheLowerTriangle(_WithKernels):
    """eigvalsh reads the lower triangle, whatever UPLO is."""

    @staticmethod
    def _eigh(x: torch.Tensor, part: str = "L", vectors: bool = True) -> Any:
        lower = x.tril() + x.tril(-1).mT
        values, found = torch.linalg.eig(lower)
        order = values.real.argsort()
        return values.real[order], found.real[:, order]

    kernels = {"_linalg_eigh": _eigh}


class IntegersThroughFloat32(_WithKernels):
    """A product of integer matrices is made in float32."""

    kernels = {"mm": lambda a, b: (a.float()[:, :, None] * b.float()[None]).sum(1).to(a.dtype)}


class SmallNumbersAreLost(_WithKernels):
    """log1p adds 1 first."""

    kernels = {"log1p": lambda x: (1 + x).log()}


CAUGHT_BY: dict[type[Accelerator], str] = {
    LerpStaysBetween: "dtypes/known_results",
    SumOfNothingIsNaN: "dtypes/known_results",
    PutsTheLast: "dtypes/known_results",
    UpperEdgeIsOutside: "dtypes/known_results",
    BetaIsOne: "dtypes/known_results",
    CopiesInOrder: "dtypes/known_results",
    CornersAreNeverAligned: "dtypes/known_results",
    EigenvaluesOfTheLowerTriangle: "dtypes/known_results_of_precision",
    SmallNumbersAreLost: "dtypes/known_results_of_precision",
    IntegersThroughFloat32: "dtypes/known_results_of_large_integers",
}
"""Each fault, and the check that has to find it."""
