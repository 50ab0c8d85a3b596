"""Faults planted in the emulated device's operators, which the inputs of torch's own tests find.

python sampled_mutants.py NAMES...

Writes what each observation says of its fault, and of the sound device, as JSON.
"""

# ruff: noqa: RUF012

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from acclimate.accelerator import Accelerator
from acclimate.accelerator.recorded_graph import is_recording
from acclimate.selection import use_accelerator
from acclimate_conformance.checks import innermost
from acclimate_conformance.checks.dtypes.sampled import (
    kernels,
    models,
    numbers,
    options,
    pairs,
    refusals,
    repeated,
    rows,
    samples,
    settings,
    sizes,
    topics,
)
from acclimate_conformance.checks.dtypes.sampled.comparing import Findings
from acclimate_sim.accelerator import SimAccelerator
from operator_mutants import SlopeOfAnotherElu, _there, _WithKernels
from sound_devices import FOUND_NOTHING_BY

_Topic = Callable[[Accelerator, Findings], None]


class SumRestarts(_WithKernels):
    """A running sum begins again after 512 elements."""

    @staticmethod
    def _cumsum(x: torch.Tensor, dim: int, *, dtype: Any = None) -> torch.Tensor:
        host = x.cpu()
        parts = host.split(512, dim) if host.dim() else (host,)
        return _there(torch.cat([p.cumsum(dim, dtype=dtype) for p in parts], dim) if host.dim() else host, x)

    kernels = {"cumsum": _cumsum}


class ViewsAreNotSupported(_WithKernels):
    """relu refuses tensors whose elements do not lie side by side, as an operator that the device lacks."""

    @staticmethod
    def _relu(x: torch.Tensor) -> torch.Tensor:
        if not x.is_contiguous():
            raise NotImplementedError("relu is not supported for views")
        return _there(x.cpu().relu(), x)

    kernels = {"relu": _relu}


class ProductCutsDigits(_WithKernels):
    """A product of bfloat16 cuts digits off instead of rounding."""

    @staticmethod
    def _mul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        there = a if a.device.type == "sim" else b
        exact = a.cpu() * b.cpu()
        if exact.dtype != torch.bfloat16:
            return _there(exact, there)
        bits = (a.cpu().float() * b.cpu().float()).contiguous().view(torch.int32) & -65536
        return _there(bits.view(torch.float32).to(torch.bfloat16), there)

    kernels = {"mul.Tensor": _mul}


class PlacesAreClamped(_WithKernels):
    """A place beyond the end counts as the last one."""

    kernels = {
        "index_select": lambda x, dim, index: _there(
            x.cpu().index_select(dim, index.cpu().clamp(0, x.shape[dim] - 1)), x
        )
    }


class ReluReadsOn(_WithKernels):
    """relu reads a tensor with gaps as if it had none."""

    @staticmethod
    def _relu(x: torch.Tensor) -> torch.Tensor:
        if not x.dim() or x.is_contiguous():
            return _there(x.cpu().relu(), x)
        steps = torch.empty(x.shape, device="meta").stride()
        return _there(x.as_strided(x.shape, steps, x.storage_offset()).cpu().relu(), x)

    kernels = {"relu": _relu}


class ResultIgnoresStrides(_WithKernels):
    """exp writes to a tensor given as out as if it had no gaps."""

    @staticmethod
    def _exp(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        result = x.cpu().exp()
        out.resize_(result.shape)
        out.as_strided(result.shape, result.stride(), out.storage_offset()).copy_(result)
        return out

    kernels = {"exp.out": _exp}


class GradientOfRows(_WithKernels):
    """The gradient of softmax is always that of the last dimension."""

    kernels = {
        "_softmax_backward_data": lambda g, y, dim, dtype: _there(
            torch.ops.aten._softmax_backward_data(g.cpu(), y.cpu(), -1, dtype), g
        )
    }


class GradientOfReducedNumbers(_WithKernels):
    """The gradient of silu in 16 bits is that of x times a constant."""

    @staticmethod
    def _silu(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float32:
            return _there(torch.ops.aten.silu_backward(gradient.cpu(), x.cpu()), x)
        return _there(gradient.cpu() * x.cpu().sigmoid(), x)

    kernels = {"silu_backward": _silu}


class LastChannelIsForgotten(_WithKernels):
    """relu of numbers with channels last leaves out the last channel."""

    @staticmethod
    def _relu(x: torch.Tensor) -> torch.Tensor:
        result = x.cpu().relu()
        if x.dim() > 2 and x.stride(1) == 1 and x.stride(-1) == x.shape[1]:
            result[:, -1] = 0
        return _there(result, x)

    kernels = {"relu": _relu}


class UnbiasedIsForgotten(_WithKernels):
    """var always divides by one less than the number of elements."""

    kernels = {
        "var.correction": lambda x, dim=None, *, correction=None, keepdim=False: _there(
            torch.var(x.cpu(), dim, correction=1, keepdim=keepdim), x
        )
    }


class CastsSaturate(_WithKernels):
    """A conversion of a floating-point number to int64 ends at 2**31."""

    @staticmethod
    def _to(x: torch.Tensor, **options: Any) -> torch.Tensor:
        asked = options.get("dtype") or x.dtype
        host = torch.empty(x.shape, dtype=x.dtype).copy_(x)
        if x.is_floating_point() and asked is torch.int64:
            host = host.clamp(-(2.0**31), 2.0**31)
        return torch.empty(x.shape, dtype=asked, device=options.get("device") or x.device).copy_(host)

    kernels = {"_to_copy": _to}


class ShiftsAreLogical(_WithKernels):
    """A shift to the right of a negative int32 brings zeros in."""

    @staticmethod
    def _shift(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype != torch.int32 or b.dtype != torch.int32:
            return _there(a.cpu() >> b.cpu(), a)
        return _there(((a.cpu().long() & 0xFFFFFFFF) >> b.cpu().long()).to(torch.int32), a)

    kernels = {"bitwise_right_shift.Tensor": _shift}


class TanhIsCoarse(_WithKernels):
    """tanh is 1 from 3 on."""

    @staticmethod
    def _tanh(x: torch.Tensor) -> torch.Tensor:
        exact = x.cpu().tanh()
        return _there(torch.where(x.cpu() >= 3, torch.ones_like(exact), exact), x)

    kernels = {"tanh": _tanh}


class LastHeadIsForgotten(_WithKernels):
    """A batched product of more than 64 columns ignores the last of these."""

    @staticmethod
    def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first, second = a.cpu(), b.cpu()
        if first.shape[2] > 64:
            first, second = first[:, :, :-1], second[:, :-1]
        return _there(torch.bmm(first, second), a)

    kernels = {"bmm": _bmm}


class StepIsNegative(_WithKernels):
    """addcdiv_ takes the absolute value of its factor."""

    @staticmethod
    def _addcdiv(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, value: float = 1) -> torch.Tensor:
        return x.copy_(torch.addcdiv(x.cpu(), a.cpu(), b.cpu(), value=abs(value)))

    kernels = {"addcdiv_": _addcdiv}


class NormIsOfSquares(_WithKernels):
    """The statistics that batch_norm keeps divide by the number of elements."""

    @staticmethod
    def _norm(x: torch.Tensor, w: Any, b: Any, mean: Any, var: Any, training: bool, *rest: float) -> Any:
        before = None if var is None else var.cpu()
        on_host = [None if t is None else t.cpu() for t in (x, w, b, mean, var)]
        result = torch.ops.aten.native_batch_norm(*on_host, training, *rest)
        if training and before is not None:
            biased = x.cpu().transpose(0, 1).flatten(1).var(1, correction=0)
            mean.copy_(on_host[3])
            var.copy_(before * (1 - rest[0]) + biased * rest[0])
        return tuple(_there(t, x) for t in result)

    kernels = {"native_batch_norm": _norm}


class GradientsOfSumsVanish(_WithKernels):
    """The gradient of tanh is 0 where that of its result is one number for all elements."""

    @staticmethod
    def _tanh(gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        shared = gradient.dim() > 0 and gradient.numel() > 1 and not any(gradient.stride())
        return _there(torch.ops.aten.tanh_backward(gradient.cpu() * (not shared), y.cpu()), y)

    kernels = {"tanh_backward": _tanh}


class LoneGradientIsForgotten(_WithKernels):
    """The gradient of layer_norm for its weight is 0 unless its input has one too."""

    @staticmethod
    def _norm(
        g: torch.Tensor, x: torch.Tensor, shape: Any, mean: Any, rstd: Any, w: Any, b: Any, mask: Any
    ) -> Any:
        given = [None if t is None else t.cpu() for t in (mean, rstd, w, b)]
        found = torch.ops.aten.native_layer_norm_backward(g.cpu(), x.cpu(), shape, *given, mask)
        found = [None if t is None or not kept else t for t, kept in zip(found, mask, strict=True)]
        if not mask[0] and found[1] is not None:
            found[1] = torch.zeros_like(found[1])
        return tuple(None if t is None else _there(t, x) for t in found)

    kernels = {"native_layer_norm_backward": _norm}


class SecondFactorLosesNaN(_WithKernels):
    """addcmul takes NaN in its last tensor for 0."""

    kernels = {
        "addcmul": lambda x, a, b, *, value=1: _there(
            torch.addcmul(x.cpu(), a.cpu(), b.cpu().nan_to_num(0, float("inf"), -float("inf")), value=value),
            x,
        )
    }


class StridesOfTheFirst(_WithKernels):
    """maximum reads both tensors with the strides of the first."""

    @staticmethod
    def _maximum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        like = a if a.device.type == "sim" else b
        if a.shape == b.shape and sorted(a.stride()) == sorted(b.stride()):
            b = b.as_strided(b.shape, a.stride(), b.storage_offset())
        return _there(torch.maximum(a.cpu(), b.cpu()), like)

    kernels = {"maximum": _maximum}


class ReducedNumbersReadOn(_WithKernels):
    """relu reads a tensor of 16 bits with gaps as if it had none."""

    @staticmethod
    def _relu(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float32 or not x.dim() or x.is_contiguous():
            return _there(x.cpu().relu(), x)
        steps = torch.empty(x.shape, device="meta").stride()
        return _there(x.as_strided(x.shape, steps, x.storage_offset()).cpu().relu(), x)

    kernels = {"relu": _relu}


class NumbersOfTheHostAreWhole(_WithKernels):
    """A product with a number of the host takes its integer part."""

    @staticmethod
    def _mul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        there = a if a.device.type == "sim" else b
        first, second = (t.cpu().trunc() if t.device.type == "cpu" else t.cpu() for t in (a, b))
        return _there(first * second, there)

    kernels = {"mul.Tensor": _mul}


class SixDimensionsAtMost(_WithKernels):
    """exp of a tensor of seven dimensions ignores its strides."""

    @staticmethod
    def _exp(x: torch.Tensor) -> torch.Tensor:
        if x.dim() < 7 or x.is_contiguous():
            return _there(x.cpu().exp(), x)
        steps = torch.empty(x.shape, device="meta").stride()
        return _there(x.as_strided(x.shape, steps, x.storage_offset()).cpu().exp(), x)

    kernels = {"exp": _exp}


class NormsOverflow(_WithKernels):
    """The norm of each tensor of a list squares in 16 bits."""

    @staticmethod
    def _norms(tensors: list[torch.Tensor], ord: Any = 2, dtype: Any = None) -> list[torch.Tensor]:
        found = torch._foreach_norm([t.cpu() for t in tensors], ord, dtype)
        for tensor, norm in zip(tensors, found, strict=True):
            if norm.dtype is torch.float16 and tensor.numel() and float(tensor.cpu().abs().max()) > 256:
                norm.fill_(float("inf"))
        return [_there(norm, tensors[0]) for norm in found]

    kernels = {"_foreach_norm.Scalar": _norms}


class ManyTensorsAreTooMany(_WithKernels):
    """A sum of more than 64 tensors and others leaves the rest as they are."""

    @staticmethod
    def _add(tensors: list[torch.Tensor], others: list[torch.Tensor], *, alpha: float = 1) -> Any:
        pairs = enumerate(zip(tensors, others, strict=True))
        return [_there(t.cpu() + alpha * other.cpu() * (place < 64), t) for place, (t, other) in pairs]

    kernels = {"_foreach_add.List": _add}


class IntegersSaturate(_WithKernels):
    """A product of matrices of int8 ends at the largest number of 16 bits."""

    kernels = {
        "_int_mm": lambda a, b: _there(torch._int_mm(a.cpu(), b.cpu()).clamp(-(2**15), 2**15 - 1), a),
    }


class StepsAreAdded(_WithKernels):
    """arange adds its step again and again."""

    @staticmethod
    def _arange(start: float, end: float, step: float = 1, *, out: torch.Tensor) -> torch.Tensor:
        exact = torch.arange(start, end, step, dtype=out.dtype)
        if exact.is_floating_point() and exact.numel():
            steps = torch.full_like(exact, step)
            steps[0] = start
            exact = torch.from_numpy(steps.numpy().cumsum(dtype=steps.numpy().dtype))
        return out.resize_(exact.shape).copy_(exact)

    kernels = {"arange.start_out": _arange}


class EndIsMissed(_WithKernels):
    """A linspace of more than 100 numbers ends a little before its end, as after many additions."""

    @staticmethod
    def _linspace(start: float, end: float, steps: int, *, out: torch.Tensor) -> torch.Tensor:
        exact = torch.linspace(start, end, steps, dtype=out.dtype)
        if steps > 100:
            exact[-1] *= 1 - 3e-5
        return out.resize_(exact.shape).copy_(exact)

    kernels = {"linspace.out": _linspace}


class MatricesInOrderOfMemory(_WithKernels):
    """silu of a transposed matrix takes its elements in the order of memory."""

    @staticmethod
    def _silu(x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2 or x.is_contiguous():
            return _there(torch.nn.functional.silu(x.cpu()), x)
        return _there(torch.nn.functional.silu(x.cpu()).t().contiguous().reshape(x.shape), x)

    kernels = {"silu": _silu}


class StridedGradientsHaveNoNorm(_WithKernels):
    """The norms of a list are 0 for tensors that are not contiguous."""

    @staticmethod
    def _norms(tensors: list[torch.Tensor], ord: Any = 2, dtype: Any = None) -> list[torch.Tensor]:
        found = torch._foreach_norm([t.cpu() for t in tensors], ord, dtype)
        return [_there(n * t.is_contiguous(), t) for n, t in zip(found, tensors, strict=True)]

    kernels = {"_foreach_norm.Scalar": _norms}


class StridedGradientsAreNotClipped(StridedGradientsHaveNoNorm):
    """Clipping leaves out gradients that are not contiguous."""


class GradientsInOrderOfMemory(_WithKernels):
    """The gradient of silu of a transposed matrix takes its elements in the order of memory."""

    @staticmethod
    def _silu(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        found = torch.ops.aten.silu_backward(gradient.cpu(), x.cpu())
        if x.dim() == 2 and not x.is_contiguous():
            found = found.t().contiguous().reshape(x.shape)
        return _there(found, x)

    kernels = {"silu_backward": _silu}


class SumsOf24Bits(_WithKernels):
    """A running sum of float64 is one of float32."""

    @staticmethod
    def _cumsum(x: torch.Tensor, dim: int, *, dtype: Any = None) -> torch.Tensor:
        host = x.cpu()
        if host.dtype is not torch.float64:
            return _there(host.cumsum(dim, dtype=dtype), x)
        return _there(host.float().cumsum(dim, dtype=None).to(dtype or x.dtype), x)

    kernels = {"cumsum": _cumsum}


class FirstRateIsKept(_WithKernels):
    """AdamW reads a rate that is a tensor in the first step only."""

    _kept: dict[int, torch.Tensor] = {}

    @staticmethod
    def _adamw(*lists: Any, lr: torch.Tensor, **options: Any) -> None:
        there = [[t.cpu() for t in tensors] for tensors in lists]
        rate = FirstRateIsKept._kept.setdefault(lists[0][0].data_ptr(), lr.cpu().clone())
        torch._fused_adamw_(*there, lr=rate, **options)
        for ours, theirs in zip(lists, there, strict=True):
            for tensor, changed in zip(ours, theirs, strict=True):
                tensor.copy_(changed)

    kernels = {"_fused_adamw_.tensor_lr": _adamw}


class FirstFactorOfAll(_WithKernels):
    """A product of several tensors and several numbers takes the first of these for all."""

    @staticmethod
    def _mul(tensors: list[torch.Tensor], factors: list[float]) -> list[torch.Tensor]:
        return [_there(t.cpu() * factors[0], t) for t in tensors]

    kernels = {"_foreach_mul.ScalarList": _mul}


class HypSineOf24Bits(_WithKernels):
    """sinh of float64 is that of float32."""

    kernels = {
        "sinh": lambda x: _there(
            x.cpu().float().sinh().double() if x.dtype is torch.float64 else x.cpu().sinh(), x
        )
    }


class MinimumLosesNaN(_WithKernels):
    """The smaller one of NaN and a number is the number."""

    kernels = {
        "minimum": lambda a, b: _there(torch.fmin(a.cpu(), b.cpu()), a if a.device.type == "sim" else b)
    }


class PlacesAreOneOff(_WithKernels):
    """topk names the place after the one where the number is."""

    @staticmethod
    def _topk(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        values, places = x.cpu().topk(k, dim, largest, sorted)
        return _there(values, x), _there((places + 1) % (x.shape[dim] if x.dim() else 1), x)

    kernels = {"topk": _topk}


class ModeIsTheLeast(_WithKernels):
    """mode gives the smallest number."""

    kernels = {
        "mode": lambda x, dim=-1, keepdim=False: tuple(_there(t, x) for t in x.cpu().min(dim, keepdim))
    }


class GradientOfNormIn16Bits(_WithKernels):
    """The gradients of layer_norm are computed in bfloat16."""

    @staticmethod
    def _norm(gradient: torch.Tensor, x: torch.Tensor, shape: list[int], *others: Any) -> Any:
        *given, mask = others
        there = [None if t is None else t.cpu() for t in given]
        found = torch.ops.aten.native_layer_norm_backward(gradient.cpu(), x.cpu(), shape, *there, mask)
        return tuple(None if t is None else _there(t.bfloat16().to(t.dtype), x) for t in found)

    kernels = {"native_layer_norm_backward": _norm}


class InfinityIsLargest(_WithKernels):
    """The gradient of softmax is finite where it must not be."""

    @staticmethod
    def _softmax(g: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        return _there(torch.ops.aten._softmax_backward_data(g.cpu(), y.cpu(), dim, dtype).nan_to_num(), g)

    kernels = {"_softmax_backward_data": _softmax}


class WhereTakesTwoDevices(_WithKernels):
    """where takes tensors of several devices."""

    @staticmethod
    def _where(chosen: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.where(chosen.cpu(), x.cpu(), y.cpu()).to("sim")

    kernels = {"where.self": _where}


class WritesToSharedElements(_WithKernels):
    """mul_ writes to an expanded tensor."""

    @staticmethod
    def _mul(x: torch.Tensor, other: Any) -> torch.Tensor:
        result = x.cpu().mul(other.cpu() if isinstance(other, torch.Tensor) else other)
        if x.dim() and not x.stride(0):
            x[:1].copy_(result[:1])
            return x
        return x.copy_(result)

    kernels = {"mul_.Tensor": _mul}


class SubtractsTruths(_WithKernels):
    """The difference of two truth values is whether they differ."""

    @staticmethod
    def _sub(x: Any, other: Any, *, alpha: float = 1) -> torch.Tensor:
        ours, theirs = (value.cpu() if isinstance(value, torch.Tensor) else value for value in (x, other))
        if getattr(ours, "dtype", None) is torch.bool and getattr(theirs, "dtype", None) is torch.bool:
            return (ours ^ theirs).to("sim")
        return torch.sub(ours, theirs, alpha=alpha).to("sim")

    kernels = {"sub.Tensor": _sub}


class SecondFactorIsNotConjugated(_WithKernels):
    """A product of matrices takes no notice that the second one is conjugated."""

    @staticmethod
    def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        lost = b.conj() if b.is_conj() and b.device.type == "sim" else b.resolve_conj()
        return torch.mm(a.resolve_conj(), lost)

    key = "Conjugate"
    kernels = {"mm": _product}


class OneScaleOfAllRows(_WithKernels):
    """A product with packed rows of 8 bits takes the first row's scale for each."""

    @staticmethod
    def _product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        there = scales.cpu()[:1].expand(len(scales)).contiguous()
        return _there(torch._weight_int8pack_mm(x.cpu(), weight.cpu(), there), x)

    kernels = {"_weight_int8pack_mm": _product}


class LongListsAreCut(_WithKernels):
    """_foreach_mul_ leaves the tensors after the 110th as they were."""

    @staticmethod
    def _multiply(tensors: list[torch.Tensor], factor: float) -> None:
        for tensor in tensors[:110]:
            tensor.mul_(factor)

    kernels = {"_foreach_mul_.Scalar": _multiply}


class MaskOfTheFirstBatch(_WithKernels):
    """Attention masks each batch as the first."""

    def __init__(self) -> None:
        super().__init__()
        name = "_scaled_dot_product_fused_attention_overrideable"
        kernel = torch.library.get_kernel(f"aten::{name}", "PrivateUse1")

        def attention(
            keys: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: Any = None,
            *options: Any, **others: Any,
        ) -> Any:  # fmt: skip
            masked = bias[:1].expand_as(bias) if bias is not None and bias.dim() == 4 else bias
            return kernel.call_boxed(keys, query, key, value, masked, *options, **others)

        self._library.impl(name, attention, self.key, with_keyset=True)

    kernels = {}


class QueriesBeginAtEvenPlaces(_WithKernels):
    """Attention reads queries from a place that is a multiple of four."""

    def __init__(self) -> None:
        super().__init__()
        name = "_scaled_dot_product_fused_attention_overrideable"
        kernel = torch.library.get_kernel(f"aten::{name}", "PrivateUse1")

        def attention(keys: Any, query: torch.Tensor, *args: Any, **options: Any) -> Any:
            place = query.storage_offset()
            moved = query.as_strided(query.shape, query.stride(), place - place % 4)
            return kernel.call_boxed(keys, moved, *args, **options)

        self._library.impl(name, attention, self.key, with_keyset=True)

    kernels = {}


class ClampIntoOthersForgetsTheLeast(_WithKernels):
    """clamp into a tensor given as out ignores the least number."""

    kernels = {
        "clamp.Tensor_out": lambda x, least=None, most=None, *, out: out.copy_(
            x if most is None else torch.minimum(x.cpu(), most.cpu())
        ),
    }


class SlopeOfGeluEnds(_WithKernels):
    """The gradient of gelu is 0 beyond 4,096 elements."""

    @staticmethod
    def _backward(gradient: torch.Tensor, x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
        found = torch.ops.aten.gelu_backward(gradient.cpu(), x.cpu(), approximate=approximate)
        found.view(-1)[4096:] = 0
        return _there(found, x)

    kernels = {"gelu_backward": _backward}


def _in_order_of_memory(x: torch.Tensor) -> torch.Tensor:
    """What a kernel reads that takes a tensor with channels last for one without."""
    host = x.cpu().contiguous()
    if x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return host.permute(0, 2, 3, 1).reshape(x.shape)
    return host


class ChannelsOfGradientsAreRows(_WithKernels):
    """The gradient of avg_pool2d reads a gradient with channels last as if these were not."""

    kernels = {
        "avg_pool2d_backward": lambda gradient, x, *options: _there(
            torch.ops.aten.avg_pool2d_backward(_in_order_of_memory(gradient), x.cpu(), *options), x
        )
    }


class ChannelsOfFactorsAreRows(_WithKernels):
    """The gradient of tanh reads images with channels last as if these were not."""

    kernels = {
        "tanh_backward": lambda gradient, y: _there(
            torch.ops.aten.tanh_backward(_in_order_of_memory(gradient), y.cpu()), y
        )
    }


class ExpandedRowsAreRead(_WithKernels):
    """silu of one row that is expanded reads beyond it, and gets zeros there."""

    @staticmethod
    def _silu(x: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.silu(x.cpu())
        if x.dim() > 1 and not x.stride(0):
            found[1:] = 0
        return _there(found, x)

    kernels = {"silu": _silu}


class SquareRootsIn16BitsAreNotTaken(_WithKernels):
    """sqrt_ of numbers of 16 bits does nothing."""

    kernels = {"sqrt_": lambda x: x if x.dtype.itemsize == 2 else x.copy_(x.cpu().sqrt())}


class TruthsInOrderOfMemory(_WithKernels):
    """gather of truth values reads a transposed tensor as if it were not."""

    @staticmethod
    def _gather(
        x: torch.Tensor, dim: int, places: torch.Tensor, *, sparse_grad: bool = False
    ) -> torch.Tensor:
        given = x.cpu().contiguous()
        if x.dtype is torch.bool and x.dim() > 1 and not x.is_contiguous():
            given = given.transpose(0, -1).reshape(x.shape)
        return _there(given.gather(dim, places.cpu()), x)

    kernels = {"gather": _gather}


class TailsOf16BitsAreLost(_WithKernels):
    """The last elements of a silu of many numbers of 16 bits stay 0."""

    @staticmethod
    def _silu(x: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.silu(x.cpu()).contiguous()
        if x.dtype.itemsize == 2 and x.numel() > 4096:
            found.view(-1)[x.numel() // 8 * 8 :] = 0
        return _there(found, x)

    kernels = {"silu": _silu}


class RateOfATensorDescends(_WithKernels):
    """A fused AdamW whose rate is a tensor ignores maximize."""

    @staticmethod
    def _adamw(*args: Any, **options: Any) -> None:
        tensors = [[t.cpu() for t in group] for group in args[:6]]
        rate = options.pop("lr").cpu()
        torch._fused_adamw_(*tensors, lr=rate, **{**options, "maximize": False})
        for there, here in zip(args[:6], tensors, strict=True):
            for target, source in zip(there, here, strict=True):
                target.copy_(source)

    kernels = {"_fused_adamw_.tensor_lr": _adamw}


class SlopeOfAnotherSelu(SlopeOfAnotherElu):
    """The gradient of selu in place takes the result for the input."""


class TooFewElementsAreRepeated(_WithKernels):
    """masked_scatter_ begins its source again where that ends."""

    @staticmethod
    def _scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        given = source.cpu().reshape(-1)
        needed = int(mask.cpu().expand(x.shape).sum())
        if given.numel():
            given = given.repeat(needed // given.numel() + 1)
        return x.copy_(x.cpu().masked_scatter_(mask.cpu(), given))

    kernels = {"masked_scatter_": _scatter}


def _only_of_32_bits(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype is not torch.bfloat16:
            tensor.mul_(factor)


class ReducedGradientsAreNotClipped(_WithKernels):
    """Lists of bfloat16 are not multiplied in place by a tensor."""

    kernels = {"_foreach_mul_.Tensor": _only_of_32_bits}


class ReducedListsAreNotMultiplied(_WithKernels):
    """The same, which lists of tensors show too."""

    kernels = {"_foreach_mul_.Tensor": _only_of_32_bits}


def _only_of_dimensions(tensors: list[torch.Tensor], ends: list[torch.Tensor], weight: float) -> None:
    for tensor, end in zip(tensors, ends, strict=True):
        if tensor.dim():
            tensor.lerp_(end, weight)


class NumbersAreNotTrained(_WithKernels):
    """Parameters without dimensions have no first moment in Adam's foreach steps."""

    kernels = {"_foreach_lerp_.Scalar": _only_of_dimensions}


class NumbersInListsStay(_WithKernels):
    """The same, which lists of tensors show too."""

    kernels = {"_foreach_lerp_.Scalar": _only_of_dimensions}


class ZeroHasNoSign(_WithKernels):
    """sgn of a complex zero is not a number, and so is the gradient of abs there."""

    @staticmethod
    def _sgn(x: torch.Tensor) -> torch.Tensor:
        given = x.cpu()
        return _there(given / given.abs() if given.is_complex() else given.sgn(), x)

    kernels = {"sgn": _sgn}


class ResultsAreUsedUp(_WithKernels):
    """The gradient of tanh clears the result that it was computed from."""

    @staticmethod
    def _tanh(gradient: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        found = torch.ops.aten.tanh_backward(gradient.cpu(), result.cpu())
        result.zero_()
        return _there(found, gradient)

    kernels = {"tanh_backward": _tanh}


class ZeroIsAboveZero(_WithKernels):
    """The gradient of relu passes where its input is 0."""

    kernels = {
        "threshold_backward": lambda g, x, threshold: _there(
            torch.where(x.cpu() >= threshold, g.cpu(), torch.zeros(())), x
        )
    }


class CellsHaveBothGradients(SimAccelerator):
    """The gradient of an LSTM's cell takes the gradient of its output for 1 if the loss does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self._library = torch.library.Library("aten", "IMPL")
        name = "_thnn_fused_lstm_cell_backward_impl"
        theirs = torch.library.get_kernel(f"aten::{name}", "PrivateUse1")

        def backward(keys: Any, of_output: Any, of_cell: Any, *others: Any) -> Any:
            given = torch.ones_like(of_cell) if of_output is None else of_output
            return theirs.call_boxed(keys, given, of_cell, *others)

        self._library.impl(name, backward, "PrivateUse1", with_keyset=True, allow_override=True)

    def uninstall(self) -> None:
        """Puts the device's own operator back."""
        self._library._destroy()


class FastLayersNormLast(SimAccelerator):
    """Layers of transformers norm last if they are not trained, whatever norm_first says."""

    def __init__(self) -> None:
        super().__init__()
        self._library = torch.library.Library("aten", "IMPL")
        name = "_transformer_encoder_layer_fwd"
        theirs = torch.library.get_kernel(f"aten::{name}", "PrivateUse1")

        def layer(keys: Any, *given: Any) -> Any:
            return theirs.call_boxed(keys, *given[:8], False, *given[9:])

        self._library.impl(name, layer, "PrivateUse1", with_keyset=True, allow_override=True)

    def uninstall(self) -> None:
        """Puts the device's own operator back."""
        self._library._destroy()


class NothingSumsToZero(_WithKernels):
    """The logarithm of a sum of no exponentials is 0, not minus infinity."""

    @staticmethod
    def _logsumexp(x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
        found = x.cpu().logsumexp(dim, keepdim)
        return _there(found if x.numel() else torch.zeros_like(found), x)

    kernels = {"logsumexp": _logsumexp}


class FirstDtypeWins(_WithKernels):
    """maximum of two dtypes has that of the first."""

    kernels = {
        "maximum": lambda a, b: _there(
            torch.maximum(a.cpu(), b.cpu()).to(a.dtype), a if a.device.type == "sim" else b
        )
    }


class ResultIsClearedFirst(_WithKernels):
    """exp clears what it is given as out before it reads its input."""

    kernels = {"exp.out": lambda x, *, out: out.zero_().copy_(x.cpu().exp())}


class SmallResultsMoveAway(_WithKernels):
    """What exp is given as out without elements gets other memory."""

    @staticmethod
    def _exp(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        found = _there(x.cpu().exp(), x)
        return out.copy_(found) if out.shape == found.shape else out.set_(found)

    kernels = {"exp.out": _exp}


class WindowsAreDense(_WithKernels):
    """silu reads a tensor without expanded dimensions as if its elements followed each other."""

    @staticmethod
    def _silu(x: torch.Tensor) -> torch.Tensor:
        host = x.cpu() if x.is_contiguous() else x
        if x.dim() == 2 and x.stride() == (1, 1):
            whole = x.as_strided((x.shape[0] + x.shape[1] - 1,), (1,)).cpu()
            host = torch.cat([whole, torch.zeros(x.numel(), dtype=x.dtype)])[: x.numel()].view(x.shape)
        return _there(torch.nn.functional.silu(host.cpu()), x)

    kernels = {"silu": _silu}


class FirstFactorIsKept(_WithKernels):
    """addcmul of one shape keeps the factor that it was called with first."""

    first: dict[Any, float] = {}

    @staticmethod
    def _addcmul(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, value: float = 1) -> torch.Tensor:
        value = FirstFactorIsKept.first.setdefault((x.shape, a.shape, b.shape), value)
        return _there(torch.addcmul(x.cpu(), a.cpu(), b.cpu(), value=value), x)

    kernels = {"addcmul": _addcmul}


class EmptyOnesShiftFactors(_WithKernels):
    """Tensors without elements are left out of lists, and their factors are not."""

    @staticmethod
    def _mul(tensors: list[torch.Tensor], factors: list[float]) -> list[torch.Tensor]:
        left = iter(factors)
        return [t * next(left) if t.numel() else t.clone() for t in tensors]

    kernels = {"_foreach_mul.ScalarList": _mul}


class LongNormsAreOfTheStart(_WithKernels):
    """The largest number of a list's tensor is looked for among its first 65,536."""

    @staticmethod
    def _norm(tensors: list[torch.Tensor], ord: Any = 2, dtype: Any = None) -> list[torch.Tensor]:
        parts = [t.cpu().flatten() for t in tensors]
        if ord == float("inf"):
            parts = [part[: 1 << 16] for part in parts]
        found = [torch.linalg.vector_norm(part, ord, dtype=dtype) for part in parts]
        return [_there(one, t) for one, t in zip(found, tensors, strict=True)]

    kernels = {"_foreach_norm.Scalar": _norm}


class DtypeOfTheFirstPair(_WithKernels):
    """A list of several dtypes is copied into as if all had that of the first."""

    @staticmethod
    def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool = False) -> None:
        for target, source in zip(targets, sources, strict=True):
            if target.dtype is targets[0].dtype:
                target.copy_(source)

    kernels = {"_foreach_copy_": _copy}


class ImagesBeginAtTheFirst(_WithKernels):
    """avg_pool2d of images with channels last reads from the start of their memory."""

    @staticmethod
    def _pool(x: torch.Tensor, *options: Any) -> torch.Tensor:
        if x.dim() == 4 and not x.is_contiguous():
            x = x.as_strided(x.shape, x.stride(), 0)
        return _there(torch.ops.aten.avg_pool2d(x.cpu(), *options), x)

    kernels = {"avg_pool2d": _pool}


class StepsOfOneElementCount(_WithKernels):
    """silu of a tensor whose last dimension has one element goes by the step of that dimension."""

    @staticmethod
    def _silu(x: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.silu(x.cpu())
        odd = x.dim() and x.shape[-1] == 1 and x.stride(-1) != 1
        return _there(torch.zeros_like(found) if odd else found, x)

    kernels = {"silu": _silu}


class TruthsHaveAllBits(_WithKernels):
    """isnan gives truth values with all bits of their byte set."""

    kernels = {"isnan": lambda x: _there(x.cpu().isnan().view(torch.uint8) * 255, x).view(torch.bool)}


class NegativeSlopesAreTaken(_WithKernels):
    """leaky_relu in place takes a negative slope, though its gradient cannot be told from the result."""

    @staticmethod
    def _backward(g: torch.Tensor, x: torch.Tensor, slope: float, is_result: bool) -> torch.Tensor:
        return _there(torch.where(x.cpu() > 0, g.cpu(), g.cpu() * slope), x)

    kernels = {"leaky_relu_backward": _backward}


class TailsOfBytesAreLost(_WithKernels):
    """flip moves numbers of 8 bits by four, and leaves the rest."""

    @staticmethod
    def _flip(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
        found = x.cpu().flip(dims)
        if x.dtype is torch.uint8:
            found.view(-1)[x.numel() // 4 * 4 :] = 0
        return _there(found, x)

    kernels = {"flip": _flip}


class LongRowsHaveNoGradient(_WithKernels):
    """The gradient of softmax ends after 1,024 elements."""

    @staticmethod
    def _softmax(g: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        found = torch.ops.aten._softmax_backward_data(g.cpu(), y.cpu(), dim, dtype)
        found[..., 1024:] = 0
        return _there(found, g)

    kernels = {"_softmax_backward_data": _softmax}


class TailsOfReducedRowsAreLost(_WithKernels):
    """amax of bfloat16 leaves out what follows the last full block of 256."""

    @staticmethod
    def _amax(x: torch.Tensor, dim: Any = (), keepdim: bool = False) -> torch.Tensor:
        given = x.cpu()
        if x.dtype is torch.bfloat16 and x.dim() == 1 and x.numel() > 256:
            given = given[: x.numel() // 256 * 256]
        return _there(given.amax(dim, keepdim), x)

    kernels = {"amax": _amax}


class ThreadsGetZeros(_WithKernels):
    """exp gives zeros on a device that is not the current one, or in inference_mode."""

    kernels = {
        "exp": lambda x: _there(x.cpu().exp() * (not torch.is_inference_mode_enabled()), x),
    }


class StreamsOfThreadsAreLate(_WithKernels):
    """exp gives zeros on a stream of the program's in a thread of the program's."""

    @staticmethod
    def _exp(x: torch.Tensor) -> torch.Tensor:
        here = torch.accelerator.current_stream(x.device.index)
        is_main = threading.current_thread() is threading.main_thread()
        return _there(x.cpu().exp() * (is_main or here.stream_id == 0), x)

    kernels = {"exp": _exp}


class ReplaysOfErfAreOne(_WithKernels):
    """In a graph, erf reads its input at the capture only."""

    _captured: dict[int, torch.Tensor] = {}

    @staticmethod
    def _erf(x: torch.Tensor) -> torch.Tensor:
        known = ReplaysOfErfAreOne._captured
        if is_recording():
            known[x.data_ptr()] = x.cpu().erf()
            return _there(known[x.data_ptr()], x)
        return _there(known.pop(x.data_ptr(), x.cpu().erf()), x)

    kernels = {"erf": _erf}


class QuotientsOf32Bits(_WithKernels):
    """The root of integers is float32, whatever torch's default dtype is."""

    kernels = {
        "sqrt": lambda x: _there(x.cpu().sqrt().float() if x.dtype is torch.int64 else x.cpu().sqrt(), x),
    }


class ResultsAreKeptByAddress(_WithKernels):
    """silu of the same memory is what it was before."""

    _kept: dict[tuple[int, Any, Any], torch.Tensor] = {}

    @staticmethod
    def _silu(x: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.silu(x.cpu())
        known, given = ResultsAreKeptByAddress._kept.get(x.data_ptr(), (None, None))
        if known is x:
            return _there(given, x)
        ResultsAreKeptByAddress._kept[x.data_ptr()] = (x, found)
        return _there(found, x)

    kernels = {"silu": _silu}


class PlansAreOfShapes(_WithKernels):
    """log reads a tensor with the strides of the last one of that shape."""

    _strides: dict[Any, Any] = {}

    @staticmethod
    def _log(x: torch.Tensor) -> torch.Tensor:
        strides = PlansAreOfShapes._strides.setdefault((tuple(x.shape), x.dtype), x.stride())
        if x.untyped_storage().nbytes() == x.numel() * x.element_size():
            return _there(x.as_strided(x.shape, strides, x.storage_offset()).cpu().log(), x)
        return _there(x.cpu().log(), x)

    kernels = {"log": _log}


class GradientsOfTheLastCall(_WithKernels):
    """The gradient of tanh is that of its last call with as many elements."""

    _last: dict[Any, torch.Tensor] = {}

    @staticmethod
    def _tanh(x: torch.Tensor) -> torch.Tensor:
        GradientsOfTheLastCall._last[x.numel()] = x.cpu().tanh()
        return _there(GradientsOfTheLastCall._last[x.numel()], x)

    @staticmethod
    def _backward(gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        last = GradientsOfTheLastCall._last.get(y.numel(), y.cpu()).reshape(y.shape)
        return _there(gradient.cpu() * (1 - last**2), y)

    kernels = {"tanh": _tanh, "tanh_backward": _backward}


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    )


class SoftmaxForgetsItsDtype(_WithKernels):
    """Within autocast softmax is float32, whatever dtype is asked for."""

    key = "AutocastPrivateUse1"

    @staticmethod
    def _softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        with _without_autocast():
            return torch.softmax(x, dim, dtype=torch.float32)

    kernels = {"softmax.int": _softmax}


class WideProductsAreCast(_WithKernels):
    """Within autocast a product of float64 is one of 16 bits."""

    key = "AutocastPrivateUse1"

    @staticmethod
    def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("sim")
        with _without_autocast():
            return torch.mm(a.to(dtype), b.to(dtype)).to(a.dtype if a.dtype is torch.float64 else dtype)

    kernels = {"mm": _product}


class SumsInPlaceAreCast(_WithKernels):
    """Within autocast a product that is added in place is one of 16 bits."""

    key = "AutocastPrivateUse1"

    @staticmethod
    def _add(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, value: float = 1) -> torch.Tensor:
        given = [t.to(torch.get_autocast_dtype("sim")) for t in (x, a, b)]
        with _without_autocast():
            return x.copy_(torch.addcmul(*given, value=value))

    kernels = {"addcmul_": _add}


class LargestOfTheFirstRow(_WithKernels):
    """softmax subtracts the largest number of the first row from each."""

    @staticmethod
    def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        host = x.cpu()
        largest = host.select(0, 0).amax() if host.dim() else host
        powers = (host - largest).exp()
        return _there(powers / powers.sum(dim, keepdim=True), x)

    kernels = {"_softmax": _softmax}


class FirstMatrixIsLookedAt(_WithKernels):
    """Of a batch, only the first matrix is refused if it has no inverse."""

    @staticmethod
    def _inverse(x: torch.Tensor, *, check_errors: bool = False) -> Any:
        inverse, info = torch.linalg.inv_ex(x.cpu())
        return _there(inverse, x), _there(info.reshape(-1)[:1].expand(info.numel()).reshape(info.shape), x)

    kernels = {"linalg_inv_ex": _inverse}


class GradientsAreAddedInOrderOfMemory(_WithKernels):
    """A sum in place takes what it adds in the order of memory of its target."""

    @staticmethod
    def _sum(x: torch.Tensor, other: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
        given = other.cpu()
        if x.dim() == 2 and x.stride() != other.stride():
            given = given.t().contiguous().reshape(x.shape)
        return x.copy_(x.cpu() + alpha * given)

    kernels = {"add_.Tensor": _sum}


class ThresholdOfTheInput(_WithKernels):
    """The gradient of softplus compares its input with the threshold, not beta times its input."""

    @staticmethod
    def _softplus(gradient: torch.Tensor, x: torch.Tensor, beta: float, threshold: float) -> torch.Tensor:
        g, host = gradient.cpu(), x.cpu()
        slopes = (host * beta).sigmoid()
        return _there(torch.where(host > threshold, g, g * slopes), x)

    kernels = {"softplus_backward": _softplus}


class RowsBeyondTheGridAreZero(_WithKernels):
    """softmax of the last dimension leaves all rows after the first 65,535 zero."""

    @staticmethod
    def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        result = x.cpu().float().softmax(dim).to(x.dtype if not half_to_float else torch.float32)
        if x.dim() > 1 and dim in (-1, x.dim() - 1):
            result.flatten(0, -2)[65_535:] = 0
        return _there(result, x)

    kernels = {"_softmax": _softmax}


FOUND_BY: dict[type[SimAccelerator], tuple[_Topic, tuple[str, ...]]] = {
    ThreadsGetZeros: (settings.operators_in_any_setting, ("exp",)),
    StreamsOfThreadsAreLate: (pairs.operators_in_two_settings, ("exp",)),
    ReplaysOfErfAreOne: (pairs.operators_in_two_settings, ("erf",)),
    QuotientsOf32Bits: (settings.operators_in_any_setting, ("sqrt",)),
    ResultsAreKeptByAddress: (settings.operators_after_other_calls, ("nn.functional.silu",)),
    PlansAreOfShapes: (settings.operators_after_other_calls, ("log",)),
    GradientsOfTheLastCall: (settings.operators_after_other_calls, ("tanh",)),
    SoftmaxForgetsItsDtype: (settings.operators_within_autocast, ("softmax",)),
    WideProductsAreCast: (settings.operators_within_autocast, ("mm",)),
    SumsInPlaceAreCast: (settings.operators_within_autocast, ("addcmul",)),
    LargestOfTheFirstRow: (rows.operators_on_rows_that_differ, ("softmax",)),
    FirstMatrixIsLookedAt: (rows.operators_on_rows_that_differ, ("linalg.inv",)),
    GradientsAreAddedInOrderOfMemory: (rows.derivatives_forwards, ("sin",)),
    ThresholdOfTheInput: (options.every_option_of_an_operator, ("nn.functional.softplus",)),
    TailsOfBytesAreLost: (sizes.operators_of_any_length, ("torch.flip",)),
    LongRowsHaveNoGradient: (sizes.operators_of_any_length, ("torch.softmax",)),
    TailsOfReducedRowsAreLost: (sizes.operators_of_any_length, ("amax",)),
    ZeroHasNoSign: (topics.gradients_in_hard_cases, ("abs",)),
    ResultsAreUsedUp: (topics.gradients_in_hard_cases, ("tanh",)),
    ZeroIsAboveZero: (topics.gradients_in_hard_cases, ("nn.functional.relu",)),
    CellsHaveBothGradients: (models.modules_as_on_the_host, ("LSTM",)),
    FastLayersNormLast: (models.modules_as_on_the_host, ("TransformerEncoderLayer",)),
    NothingSumsToZero: (topics.operators_on_other_operands, ("logsumexp",)),
    FirstDtypeWins: (topics.operators_on_other_operands, ("maximum",)),
    ResultIsClearedFirst: (topics.operators_on_other_operands, ("exp",)),
    FirstFactorIsKept: (topics.operators_on_other_operands, ("addcmul",)),
    SmallResultsMoveAway: (topics.operators_in_place_and_into_others, ("exp",)),
    WindowsAreDense: (topics.operators_on_any_layout, ("nn.functional.silu",)),
    ImagesBeginAtTheFirst: (topics.operators_on_any_layout, ("nn.functional.avg_pool2d",)),
    StepsOfOneElementCount: (topics.operators_on_any_layout, ("nn.functional.silu",)),
    TruthsHaveAllBits: (topics.operators_as_on_the_host, ("isnan",)),
    EmptyOnesShiftFactors: (topics.lists_of_tensors_as_on_the_host, ("_foreach_mul",)),
    LongNormsAreOfTheStart: (models.gradients_are_clipped, ()),
    DtypeOfTheFirstPair: (topics.lists_of_tensors_as_on_the_host, ("_foreach_copy",)),
    NegativeSlopesAreTaken: (refusals.wrong_arguments_are_refused, ()),
    ClampIntoOthersForgetsTheLeast: (kernels.kernels_as_on_the_host, ("clamp",)),
    SlopeOfGeluEnds: (kernels.kernels_as_on_the_host, ("nn.functional.gelu",)),
    SumRestarts: (sizes.operators_of_any_length, ("torch.cumsum",)),
    ProductCutsDigits: (numbers.results_are_rounded, ()),
    PlacesAreClamped: (refusals.wrong_arguments_are_refused, ()),
    WhereTakesTwoDevices: (refusals.wrong_arguments_are_refused, ()),
    WritesToSharedElements: (refusals.wrong_arguments_are_refused, ()),
    SubtractsTruths: (refusals.wrong_arguments_are_refused, ()),
    ReluReadsOn: (topics.operators_on_any_layout, ("nn.functional.relu",)),
    ViewsAreNotSupported: (topics.operators_on_any_layout, ("nn.functional.relu",)),
    ResultIgnoresStrides: (topics.operators_in_place_and_into_others, ("exp",)),
    GradientOfRows: (topics.gradients_as_on_the_host, ("softmax",)),
    GradientOfReducedNumbers: (topics.gradients_as_on_the_host, ("nn.functional.silu",)),
    LastChannelIsForgotten: (topics.operators_on_any_layout, ("nn.functional.relu",)),
    UnbiasedIsForgotten: (topics.operators_as_on_the_host, ("var",)),
    CastsSaturate: (numbers.every_conversion, ()),
    ShiftsAreLogical: (numbers.pairs_of_numbers, ("bitwise_right_shift",)),
    TanhIsCoarse: (numbers.every_small_number, ("tanh",)),
    LastHeadIsForgotten: (sizes.attention_with_every_option, ()),
    StepIsNegative: (models.optimizers_as_on_the_host, ("AdamW",)),
    NormIsOfSquares: (models.modules_as_on_the_host, ("BatchNorm1d",)),
    NormsOverflow: (topics.lists_of_tensors_as_on_the_host, ("_foreach_norm",)),
    ManyTensorsAreTooMany: (topics.lists_of_tensors_as_on_the_host, ("_foreach_add",)),
    IntegersSaturate: (sizes.operators_of_any_length, ("torch._int_mm",)),
    StepsAreAdded: (sizes.operators_of_any_length, ("torch.arange",)),
    EndIsMissed: (sizes.operators_of_any_length, ("torch.linspace",)),
    FirstFactorOfAll: (topics.lists_of_tensors_as_on_the_host, ("_foreach_mul",)),
    MatricesInOrderOfMemory: (topics.operators_on_any_layout, ("nn.functional.silu",)),
    StridedGradientsHaveNoNorm: (topics.lists_of_tensors_as_on_the_host, ("_foreach_norm",)),
    StridedGradientsAreNotClipped: (models.gradients_are_clipped, ()),
    GradientsInOrderOfMemory: (topics.gradients_as_on_the_host, ("nn.functional.silu",)),
    SumsOf24Bits: (topics.operators_in_every_dtype, ("cumsum",)),
    FirstRateIsKept: (models.optimizers_as_on_the_host, ("AdamW",)),
    GradientsOfSumsVanish: (topics.gradients_as_on_the_host, ("tanh",)),
    LoneGradientIsForgotten: (topics.gradients_as_on_the_host, ("nn.functional.layer_norm",)),
    SecondFactorLosesNaN: (topics.operators_on_special_numbers, ("addcmul",)),
    StridesOfTheFirst: (topics.operators_on_any_layout, ("maximum",)),
    ReducedNumbersReadOn: (topics.operators_on_any_layout, ("nn.functional.relu",)),
    NumbersOfTheHostAreWhole: (sizes.operators_of_any_length, ("numbers of the host beside tensors",)),
    SixDimensionsAtMost: (sizes.operators_of_any_length, ("operators of seven dimensions",)),
    HypSineOf24Bits: (numbers.every_small_number, ("sinh",)),
    MinimumLosesNaN: (numbers.pairs_of_numbers, ("minimum",)),
    PlacesAreOneOff: (sizes.operators_of_any_length, ("torch.topk",)),
    ModeIsTheLeast: (sizes.operators_of_any_length, ("torch.mode",)),
    GradientOfNormIn16Bits: (topics.gradients_as_on_the_host, ("nn.functional.layer_norm",)),
    SecondFactorIsNotConjugated: (topics.operators_in_every_dtype, ("mm",)),
    OneScaleOfAllRows: (sizes.operators_of_any_length, ("torch._weight_int8pack_mm",)),
    LongListsAreCut: (topics.lists_of_tensors_as_on_the_host, ("_foreach_mul",)),
    MaskOfTheFirstBatch: (sizes.attention_with_every_option, ()),
    QueriesBeginAtEvenPlaces: (sizes.attention_with_every_option, ()),
    InfinityIsLargest: (topics.operators_on_special_numbers, ("_softmax_backward_data",)),
    ChannelsOfGradientsAreRows: (topics.gradients_as_on_the_host, ("nn.functional.avg_pool2d",)),
    ChannelsOfFactorsAreRows: (kernels.kernels_as_on_the_host, ("tanh",)),
    ExpandedRowsAreRead: (topics.operators_on_any_layout, ("nn.functional.silu",)),
    SquareRootsIn16BitsAreNotTaken: (topics.operators_in_every_dtype, ("sqrt",)),
    TruthsInOrderOfMemory: (topics.operators_on_any_layout, ("gather",)),
    TailsOf16BitsAreLost: (kernels.kernels_as_on_the_host, ("nn.functional.silu",)),
    RateOfATensorDescends: (models.optimizers_as_on_the_host, ("AdamW",)),
    TooFewElementsAreRepeated: (refusals.wrong_arguments_are_refused, ()),
    ReducedGradientsAreNotClipped: (models.gradients_are_clipped, ()),
    ReducedListsAreNotMultiplied: (topics.lists_of_tensors_as_on_the_host, ("_foreach_mul",)),
    NumbersAreNotTrained: (models.optimizers_as_on_the_host, ("Adam",)),
    RowsBeyondTheGridAreZero: (repeated.operators_beyond_the_grid, ("softmax",)),
    NumbersInListsStay: (topics.lists_of_tensors_as_on_the_host, ("_foreach_lerp",)),
    SlopeOfAnotherSelu: (topics.gradients_as_on_the_host, ("nn.functional.selu",)),
}
"""Each fault, the observation that finds it, and the operators, modules or optimizers that are tried.

All of torch's take minutes.
"""


def main(*devices: str) -> None:
    """Writes for each of these what is found on it and, for a fault, on the sound device."""
    # They change torch, as what lists the operators does.
    from torch.testing._internal import common_modules, common_optimizers

    every, lists, sized = samples.operators(), samples.lists_of_tensors(), sizes.SIZED
    layers, optimizers = common_modules.module_db, common_optimizers.optim_db
    told, of_sound = {}, {}
    for mutant, (topic, names) in {**FOUND_BY, **FOUND_NOTHING_BY}.items():
        if mutant.__name__ not in devices:
            continue
        topics.lists_of_tensors = lambda names=names: [op for op in lists if op.name in names]  # type: ignore
        for module in (topics, kernels, numbers, options, pairs, refusals, repeated, rows, settings, sizes):
            module.operators = lambda names=names: [op for op in every if op.name in names]  # type: ignore
        sizes.SIZED = {name: call for name, call in sized.items() if name in names}
        common_modules.module_db = [layer for layer in layers if layer.module_cls.__name__ in names]
        common_optimizers.optim_db = [one for one in optimizers if one.optim_cls.__name__ in names]
        told[f"{mutant.__name__} planted"] = observe(mutant, topic)
        if mutant in FOUND_BY:
            if (topic, names) not in of_sound:
                of_sound[topic, names] = observe(SimAccelerator, topic)
            told[f"{mutant.__name__} absent"] = of_sound[topic, names]
    sys.stdout.write(json.dumps(told))


def observe(kind: type[SimAccelerator], topic: _Topic) -> list[str]:
    """What an observation finds on a device."""
    accelerator = kind()
    # To look for the operator at fault takes longer than to find that one is.
    with use_accelerator(accelerator), patch.object(innermost, "_SECONDS", 0.0):
        found = Findings(accelerator)
        topic(accelerator, found)
    getattr(accelerator, "uninstall", bool)()
    return found.broken


if __name__ == "__main__":
    main(*sys.argv[1:])
