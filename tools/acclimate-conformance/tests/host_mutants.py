"""Faults planted in the operators of the host, which nothing but known results shows."""

# ruff: noqa: RUF012

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
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


class EqualNumbersAreReversed(_WithKernels):
    """A stable sort puts equal numbers in reverse order."""

    @staticmethod
    def _sort(x: torch.Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Any:
        rows = x.movedim(dim, -1) if x.dim() else x
        places = torch.empty(rows.shape, dtype=torch.int64)
        for row, target in zip(
            rows.reshape(-1, rows.shape[-1]).tolist(), places.view(-1, rows.shape[-1]), strict=True
        ):
            found = sorted(
                range(len(row)), key=lambda n, row=row: (row[n], n if descending else -n), reverse=descending
            )
            target.copy_(torch.tensor(found))
        places = places.movedim(-1, dim)
        return x.gather(dim, places), places

    kernels = {"sort.stable": _sort}


class MeanOverTheBatch(_WithKernels):
    """The gradient of mse_loss is divided by the first dimension."""

    @staticmethod
    def _backward(gradient: torch.Tensor, x: torch.Tensor, y: torch.Tensor, reduction: int) -> torch.Tensor:
        return gradient * 2 * (x - y) / (x.shape[0] if reduction == 1 else 1)

    kernels = {"mse_loss_backward": _backward}


class LastSampleHasNoGradient(_WithKernels):
    """The gradient for the weights of a layer leaves out the last sample of an odd batch above 4."""

    @staticmethod
    def _backward(
        gradient: torch.Tensor, x: torch.Tensor, shape: list[int], mean: torch.Tensor, rstd: torch.Tensor,
        weight: torch.Tensor | None, bias: torch.Tensor | None, mask: list[bool],
    ) -> Any:  # fmt: skip
        normal = (x - mean) * rstd
        slopes = gradient * (1 if weight is None else weight)
        n = x.shape[-1]
        of_x = rstd * (slopes - slopes.mean(-1, True) - normal * (slopes * normal).mean(-1, True))
        used = slice(0, len(x) - (len(x) % 2 and len(x) > 4))
        return (
            of_x,
            (gradient * normal)[used].reshape(-1, n).sum(0),
            gradient[used].reshape(-1, n).sum(0),
        )

    kernels = {"native_layer_norm_backward": _backward}


class GateHasAnotherSlope(_WithKernels):
    """The gradient of glu forgets the slope of the gate."""

    @staticmethod
    def _backward(gradient: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
        value, gate = x.chunk(2, dim)
        return torch.cat([gradient * gate.sigmoid(), gradient * value * gate.sigmoid()], dim)

    kernels = {"glu_backward": _backward}


class ClonesStayExpanded(_WithKernels):
    """clone() of an expanded tensor is expanded too."""

    @staticmethod
    def _clone(x: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
        if x.dim() == 2 and x.stride(0) == 0 and memory_format in (None, torch.preserve_format):
            return torch.empty_like(x[:1]).copy_(x[:1]).expand(x.shape)
        return torch.empty_like(x, memory_format=memory_format or torch.preserve_format).copy_(x)

    kernels = {"clone": _clone}


class OverflowIsNotSkipped(_WithKernels):
    """The fused SGD makes its step although gradients overflow."""

    @staticmethod
    def _sgd(
        weights: list[torch.Tensor], gradients: list[torch.Tensor], kept: list[torch.Tensor], *,
        weight_decay: float, momentum: float, lr: float, dampening: float, nesterov: bool, maximize: bool,
        is_first_step: bool, grad_scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        for place, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            step = gradient / (1 if grad_scale is None else grad_scale) * (-1 if maximize else 1)
            step = step + weight_decay * weight
            if kept:
                old = 0 if is_first_step else momentum * kept[place]
                kept[place].copy_(old + (1 if is_first_step else 1 - dampening) * step)
                step = step + momentum * kept[place] if nesterov else kept[place]
            weight.sub_(lr * step)

    kernels = {"_fused_sgd_": _sgd}


class LastOfManyIsZero(_WithKernels):
    """exp of an odd number of elements above 1000 leaves the last one 0."""

    @staticmethod
    def _exp(x: torch.Tensor) -> torch.Tensor:
        found = torch.exp2(x * math.log2(math.e))
        if x.dim() == 1 and len(x) > 1000 and len(x) % 2:
            found[-1] = 0
        return found

    kernels = {"exp": _exp}


class LargestOfTheFirst(_WithKernels):
    """amax looks at 4096 elements of a row."""

    @staticmethod
    def _amax(x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> torch.Tensor:
        for place in sorted((d % max(x.dim(), 1) for d in dim or range(x.dim())), reverse=True):
            x = x.narrow(place, 0, min(x.shape[place], 4096)).max(place, keepdim).values if x.dim() else x
        return x.clone()

    kernels = {"amax": _amax}


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
    EqualNumbersAreReversed: "dtypes/equal_numbers_keep_their_order",
    MeanOverTheBatch: "dtypes/losses_are_means_of_their_elements",
    LastSampleHasNoGradient: "dtypes/batches_are_their_samples",
    GateHasAnotherSlope: "dtypes/gradients_are_slopes",
    ClonesStayExpanded: "dtypes/new_tensors_own_their_elements",
    LastOfManyIsZero: "dtypes/long_tensors_are_their_parts",
    LargestOfTheFirst: "dtypes/long_reductions",
    OverflowIsNotSkipped: "dtypes/fused_optimizers_skip_overflow",
}
"""Each fault, and the check that has to find it."""
