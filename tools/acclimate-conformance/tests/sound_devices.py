"""Devices that compute otherwise than the host, as NVIDIA GPUs do, and are right: nothing may be found."""

# ruff: noqa: RUF012

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.dtypes.sampled import models, numbers, sizes, topics
from acclimate_conformance.checks.dtypes.sampled.comparing import Findings
from acclimate_sim.accelerator import SimAccelerator
from operator_mutants import _there, _WithKernels

_Topic = Callable[[Accelerator, Findings], None]


class FirstOfTwoZeros(_WithKernels):
    """The smaller one of two zeros is the first."""

    @staticmethod
    def _minimum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        there = a if a.device.type == "sim" else b
        x, y = a.cpu(), b.cpu()
        smaller = torch.minimum(x, y)
        return _there(
            torch.where((x == 0) & (y == 0), x, smaller) if x.is_floating_point() else smaller, there
        )

    kernels = {"minimum": _minimum}


class StatisticsOf32Bits(_WithKernels):
    """What layer_norm keeps for its gradients is in float32."""

    @staticmethod
    def _norm(x: torch.Tensor, shape: list[int], weight: Any, bias: Any, eps: float) -> Any:
        given = (None if t is None else t.cpu() for t in (weight, bias))
        result, *kept = torch.native_layer_norm(x.cpu(), shape, *given, eps)
        return (_there(result, x), *(_there(t.float(), x) for t in kept))

    kernels = {"native_layer_norm": _norm}


class LastOfEqualNumbers(_WithKernels):
    """topk names the last one of several equal numbers."""

    @staticmethod
    def _topk(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        host = x.cpu()
        if not host.dim():
            return tuple(_there(t, x) for t in host.topk(k, dim, largest, sorted))
        values, places = host.flip(dim).sort(dim=dim, descending=largest, stable=True)
        places = host.shape[dim] - 1 - places
        return tuple(_there(t.narrow(dim, 0, k).contiguous(), x) for t in (values, places))

    kernels = {"topk": _topk}


class OverflowsLate(_WithKernels):
    """sinh is infinite only where it is beyond the dtype, which the host's is a little earlier."""

    @staticmethod
    def _sinh(x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype if x.is_floating_point() or x.is_complex() else torch.get_default_dtype()
        exact = x.cpu().to(torch.complex128 if x.is_complex() else torch.float64).sinh()
        return _there(exact.to(dtype), x)

    kernels = {"sinh": _sinh}


class AddsAfterwards(_WithKernels):
    """baddbmm rounds the product before it adds."""

    @staticmethod
    def _baddbmm(
        x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        product = torch.bmm(a.cpu(), b.cpu()) * alpha
        return _there(product + x.cpu() * beta if beta else product, x)

    kernels = {"baddbmm": _baddbmm}


class NoFusedStep(_WithKernels):
    """Adagrad has no fused kernel."""

    @staticmethod
    def _step(*args: Any, **options: Any) -> None:
        raise RuntimeError(
            "`fused=True` requires all the params to be Tensors of supported devices: ['cpu']."
        )

    kernels = {"_fused_adagrad_": _step}


class NoGradientsInEvaluation(_WithKernels):
    """A module has gradients in training only."""

    @staticmethod
    def _norm(gradient: torch.Tensor, x: torch.Tensor, *others: Any) -> Any:
        *given, train, eps, mask = others
        if not train:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        there = [None if t is None else t.cpu() for t in given]
        found = torch.ops.aten.native_batch_norm_backward(gradient.cpu(), x.cpu(), *there, train, eps, mask)
        return tuple(None if t is None else _there(t, x) for t in found)

    kernels = {"native_batch_norm_backward": _norm}


class InfinityMinusInfinity(_WithKernels):
    """The gradient of softmax is a difference of two products."""

    @staticmethod
    def _softmax(g: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        weighted = g.cpu() * y.cpu()
        return _there((weighted - y.cpu() * weighted.sum(dim, keepdim=True)).to(dtype), g)

    kernels = {"_softmax_backward_data": _softmax}


FOUND_NOTHING_BY: dict[type[SimAccelerator], tuple[_Topic, tuple[str, ...]]] = {
    FirstOfTwoZeros: (numbers.pairs_of_numbers, ("minimum",)),
    StatisticsOf32Bits: (topics.operators_in_every_dtype, ("native_layer_norm",)),
    LastOfEqualNumbers: (sizes.operators_of_any_length, ("torch.topk",)),
    OverflowsLate: (numbers.every_small_number, ("sinh",)),
    AddsAfterwards: (numbers.results_are_rounded, ()),
    NoFusedStep: (models.optimizers_as_on_the_host, ("Adagrad",)),
    NoGradientsInEvaluation: (models.modules_as_on_the_host, ("BatchNorm1d", "BatchNorm2d")),
    InfinityMinusInfinity: (topics.operators_on_special_numbers, ("_softmax_backward_data",)),
}
"""Each device, the observation that must find nothing, and what of torch is tried."""
