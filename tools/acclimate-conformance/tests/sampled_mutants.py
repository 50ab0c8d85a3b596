"""Faults planted in the emulated device's operators, which the inputs of torch's own tests find.

python sampled_mutants.py     writes what each observation says of its fault, and of the sound device, as JSON
"""

# ruff: noqa: RUF012

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate.selection import use_accelerator
from acclimate_conformance.checks.dtypes.sampled import models, numbers, refusals, samples, sizes, topics
from acclimate_conformance.checks.dtypes.sampled.comparing import Findings
from acclimate_sim.accelerator import SimAccelerator
from operator_mutants import _there, _WithKernels

_Topic = Callable[[Accelerator, Findings], None]


class SumRestarts(_WithKernels):
    """A running sum begins again after 512 elements."""

    @staticmethod
    def _cumsum(x: torch.Tensor, dim: int, *, dtype: Any = None) -> torch.Tensor:
        host = x.cpu()
        parts = host.split(512, dim) if host.dim() else (host,)
        return _there(torch.cat([p.cumsum(dim, dtype=dtype) for p in parts], dim) if host.dim() else host, x)

    kernels = {"cumsum": _cumsum}


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


FOUND_BY: dict[type[SimAccelerator], tuple[_Topic, tuple[str, ...]]] = {
    SumRestarts: (sizes.operators_of_any_length, ("torch.cumsum",)),
    ProductCutsDigits: (numbers.results_are_rounded, ()),
    PlacesAreClamped: (refusals.wrong_arguments_are_refused, ()),
    ReluReadsOn: (topics.operators_on_any_layout, ("nn.functional.relu",)),
    ResultIgnoresStrides: (topics.operators_in_place_and_into_others, ("exp",)),
    GradientOfRows: (topics.gradients_as_on_the_host, ("softmax",)),
    GradientOfReducedNumbers: (topics.gradients_as_on_the_host, ("nn.functional.silu",)),
    LastChannelIsForgotten: (topics.operators_on_any_layout, ("nn.functional.relu",)),
    UnbiasedIsForgotten: (topics.operators_as_on_the_host, ("var",)),
    CastsSaturate: (numbers.every_conversion, ()),
    ShiftsAreLogical: (numbers.pairs_of_numbers, ("bitwise_right_shift",)),
    TanhIsCoarse: (numbers.every_small_number, ("tanh",)),
    LastHeadIsForgotten: (sizes.attention_with_every_option, ()),
    StepIsNegative: (models.optimizers_as_on_the_host, ()),
    NormIsOfSquares: (models.modules_as_on_the_host, ()),
}
"""Each fault, the observation that finds it, and the operators that are tried; torch's all take minutes."""


def main() -> None:
    """Writes for each fault what is found on the device with it, and on the sound one."""
    every, sized = samples.operators(), sizes.SIZED
    told = {}
    for mutant, (topic, names) in FOUND_BY.items():
        for module in (topics, numbers, refusals, sizes):
            module.operators = lambda names=names: [op for op in every if op.name in names]  # type: ignore
        sizes.SIZED = {name: call for name, call in sized.items() if name in names}
        for kind in (mutant, SimAccelerator):
            accelerator = kind()
            with use_accelerator(accelerator):
                found = Findings(accelerator)
                topic(accelerator, found)
            getattr(accelerator, "uninstall", bool)()
            told[f"{mutant.__name__} {'planted' if kind is mutant else 'absent'}"] = found.broken
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
