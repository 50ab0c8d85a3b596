"""Devices that compute otherwise than the host, as NVIDIA GPUs do, and are right: nothing may be found."""

# ruff: noqa: RUF012

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.dtypes.sampled import models, numbers, rows, sizes, topics
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


def _beside(found: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Of integers, the numbers beside results: a vendor's function rounds in its own way."""
    if given.is_floating_point():
        return found
    return torch.where(found.isinf(), found, found.nextafter(torch.zeros_like(found)))


class AnglesOfItsOwn(_WithKernels):
    """The angle of two integers is one unit in the last place of float32 from the host's."""

    @staticmethod
    def _atan2(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _there(_beside(torch.atan2(a.cpu(), b.cpu()), a), a)

    kernels = {"atan2": _atan2}


class PowersOfItsOwn(_WithKernels):
    """A power of float64 is one unit in the last place from the host's."""

    @staticmethod
    def _pow(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found = torch.pow(a.cpu(), b.cpu())
        return _there(_beside(found, b.long()) if found.dtype is torch.float64 else found, a)

    kernels = {"pow.Tensor_Tensor": _pow}


class LogarithmsOfItsOwn(_WithKernels):
    """x * log(y) of integers is one unit in the last place of float32 from the host's."""

    @staticmethod
    def _xlogy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _there(_beside(torch.xlogy(a.cpu(), b.cpu()), a), a)

    kernels = {"xlogy.Tensor": _xlogy}


class ZeroIsTheLarger(_WithKernels):
    """relu of -0.0 is 0.0, since the two are equal."""

    @staticmethod
    def _relu(x: torch.Tensor) -> torch.Tensor:
        host = x.cpu()
        return _there(torch.where(host == 0, torch.zeros_like(host), host.relu()), x)

    kernels = {"relu": _relu}


class PaddingTimesInfinity(_WithKernels):
    """A convolution multiplies infinity with the zeros of padding, which gives NaN."""

    @staticmethod
    def _convolution(x: torch.Tensor, weight: torch.Tensor, bias: Any, *options: Any) -> torch.Tensor:
        found = torch.convolution(x.cpu(), weight.cpu(), None if bias is None else bias.cpu(), *options)
        return _there(torch.where(found.isfinite(), found, torch.nan), x)

    kernels = {"convolution_overrideable": _convolution}


class InfiniteMean(_WithKernels):
    """A row with an infinite number is NaN throughout once it is normalised."""

    @staticmethod
    def _rms_norm(x: torch.Tensor, shape: list[int], weight: Any = None, eps: Any = None) -> torch.Tensor:
        found = torch.rms_norm(x.cpu(), shape, None if weight is None else weight.cpu(), eps)
        rows = x.cpu().isinf().flatten(-len(shape)).any(-1)
        rows = rows.reshape(*rows.shape, *[1] * len(shape))
        return _there(torch.where(rows, torch.nan, found), x)

    kernels = {"rms_norm": _rms_norm}


class StatisticsByRows(_WithKernels):
    """A private operator takes tensors only as the public function that calls it lays them out."""

    @staticmethod
    def _norm(x: torch.Tensor, *others: Any) -> Any:
        if not x.is_contiguous():
            raise RuntimeError("expected a contiguous tensor")
        *given, momentum, eps = others
        there = [None if t is None else t.cpu() for t in given]
        found = torch.ops.aten._batch_norm_with_update(x.cpu(), *there, momentum, eps)
        for mine, theirs in zip(given, there, strict=True):
            if mine is not None:
                mine.copy_(theirs)
        return tuple(_there(t, x) for t in found)

    kernels = {"_batch_norm_with_update": _norm}


class AttentionOf10Bits(_WithKernels):
    """Attention cuts float32 to the 10 bits of TF32, and so do its gradients."""

    def __init__(self) -> None:
        super().__init__()
        name = "_scaled_dot_product_fused_attention_overrideable"
        for operator, first in ((name, 0), (f"{name}_backward", 1)):
            kernel = torch.library.get_kernel(f"aten::{operator}", "PrivateUse1")

            def attention(
                keys: Any, *given: Any, kernel: Any = kernel, first: int = first, **options: Any
            ) -> Any:
                cut = map(_of_10_bits, given[first : first + 3])
                return kernel.call_boxed(keys, *given[:first], *cut, *given[first + 3 :], **options)

            self._library.impl(operator, attention, self.key, with_keyset=True)

    kernels = {}


def _of_10_bits(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not torch.float32:
        return x
    return (x.contiguous().view(torch.int32) & -8192).view(torch.float32)


_Two = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _by_steps(combine: _Two, whole: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A running sum or product that is rounded to 16 bits after each step."""

    def run(x: torch.Tensor, dim: int, *, dtype: Any = None) -> torch.Tensor:
        host = x.cpu()
        if host.dtype not in (torch.bfloat16, torch.float16) or dtype is not None or not host.dim():
            return _there(whole(host, dim, dtype=dtype), x)
        return _there(torch.stack([*itertools.accumulate(host.unbind(dim), combine)], dim), x)

    return run


class RoundsEachStep(_WithKernels):
    """Running sums and products of 16 bits are added up in 16 bits."""

    kernels = {"cumsum": _by_steps(torch.add, torch.cumsum), "cumprod": _by_steps(torch.mul, torch.cumprod)}


class FirstOfOnePlace(_WithKernels):
    """max_unpool2d keeps the first of several numbers that are put into one place."""

    @staticmethod
    def _unpool(x: torch.Tensor, places: torch.Tensor, size: list[int]) -> torch.Tensor:
        given, into = x.cpu().flatten(-2).flip(-1), places.cpu().flatten(-2).flip(-1)
        found = given.new_zeros(*x.shape[:-2], size[0] * size[1]).scatter_(-1, into, given)
        return _there(found.unflatten(-1, tuple(size)), x)

    kernels = {"max_unpool2d": _unpool}


class ComputesInTheDtypeOfTheResult(_WithKernels):
    """acosh of integers is computed in float32, in its own way, also if it is written into float64."""

    @staticmethod
    def _acosh(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        result = x.cpu().to(out.dtype if x.is_floating_point() else torch.float32).acosh()
        return out.resize_(result.shape).copy_(_beside(result, x))

    kernels = {"acosh.out": _acosh}


FOUND_NOTHING_BY: dict[type[SimAccelerator], tuple[_Topic, tuple[str, ...]]] = {
    FirstOfTwoZeros: (numbers.pairs_of_numbers, ("minimum",)),
    StatisticsOf32Bits: (topics.operators_in_every_dtype, ("native_layer_norm",)),
    LastOfEqualNumbers: (sizes.operators_of_any_length, ("torch.topk",)),
    OverflowsLate: (numbers.every_small_number, ("sinh",)),
    AddsAfterwards: (numbers.results_are_rounded, ()),
    NoFusedStep: (models.optimizers_as_on_the_host, ("Adagrad",)),
    NoGradientsInEvaluation: (models.modules_as_on_the_host, ("BatchNorm1d", "BatchNorm2d")),
    AnglesOfItsOwn: (numbers.pairs_of_numbers, ("atan2",)),
    PowersOfItsOwn: (numbers.pairs_of_numbers, ("float_power",)),
    LogarithmsOfItsOwn: (numbers.pairs_of_numbers, ("xlogy",)),
    ZeroIsTheLarger: (numbers.every_small_number, ("nn.functional.relu",)),
    PaddingTimesInfinity: (
        topics.operators_on_special_numbers,
        ("nn.functional.conv_transpose3d", "nn.functional.conv2d"),
    ),
    InfiniteMean: (topics.operators_on_special_numbers, ("nn.functional.rms_norm",)),
    StatisticsByRows: (topics.gradients_as_on_the_host, ("_batch_norm_with_update",)),
    AttentionOf10Bits: (sizes.attention_with_every_option, ()),
    RoundsEachStep: (sizes.operators_of_any_length, ("torch.cumsum", "torch.cumprod")),
    FirstOfOnePlace: (rows.derivatives_forwards, ("nn.functional.max_unpool2d",)),
    ComputesInTheDtypeOfTheResult: (topics.operators_in_place_and_into_others, ("acosh",)),
    InfinityMinusInfinity: (topics.operators_on_special_numbers, ("_softmax_backward_data",)),
}
"""Each device, the observation that must find nothing, and what of torch is tried."""
