"""Faults planted in one detail beside what is tried most: later matrices, other rows, other dtypes."""

# ruff: noqa: RUF012

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
from torch import distributed

from acclimate.accelerator import Accelerator
from acclimate_sim import compiling
from acclimate_sim.accelerator import SimAccelerator
from bounds_mutants import _Patched
from operator_mutants import _there, _WithKernels


class FirstMatricesAreChecked(_WithKernels):
    """Of a batch of matrices only the first is checked for errors."""

    @staticmethod
    def _check(info: torch.Tensor, api_name: str, *, is_matrix: bool) -> None:
        first = info.cpu().reshape(-1)[0] if info.numel() else info.cpu()
        torch._linalg_check_errors(first, api_name, is_matrix=True)

    kernels = {"_linalg_check_errors": _check}


class _Keeping(_WithKernels):
    """Keeps tensors until it is uninstalled."""

    kept: list[torch.Tensor] = []

    def uninstall(self) -> None:
        """Puts the device's own operators back, and frees what was kept."""
        super().uninstall()
        self.kept.clear()


class RefusedProductsKeepTheirOperands(_Keeping):
    """A product of shapes that do not fit keeps its operands."""

    @staticmethod
    def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        try:
            return _there(a.cpu() @ b.cpu(), a)
        except RuntimeError:
            _Keeping.kept += [a, b]
            raise

    kernels = {"mm": _product}


class RecordedTensorsAreKept(_Keeping):
    """A tensor for which record_stream() was called is never freed."""

    kernels = {"record_stream": lambda x, stream: _Keeping.kept.append(x)}


class FirstRowsChancesAreThoseOfAll(_WithKernels):
    """bernoulli_ draws every row with the chances of the first."""

    @staticmethod
    def _draw(x: torch.Tensor, p: torch.Tensor, *, generator: Any = None) -> torch.Tensor:
        chances = p.cpu().float().expand(x.shape)
        if x.dim() > 1 and len(x):
            chances = chances[:1].expand(x.shape)
        return x.copy_(torch.bernoulli(chances))

    kernels = {"bernoulli_.Tensor": _draw}


class AskedDtypesAreReplaced(_Patched):
    """Within autocast softmax is in float32, whatever dtype is asked for."""

    def patch(self) -> None:
        def softmax(theirs: Any) -> Any:
            def call(x: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor:
                casts = x.device.type == "sim" and torch.is_autocast_enabled("sim")
                result: torch.Tensor = theirs(x, dim, dtype=torch.float32 if casts else dtype)
                return result

            return call

        self.put(torch.Tensor, "softmax", softmax)


class MasksAreNotCast(_Patched):
    """Within autocast attention refuses a mask in float32."""

    def patch(self) -> None:
        def attend(theirs: Any) -> Any:
            def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> Any:
                is_wide = mask is not None and mask.dtype == torch.float32
                if is_wide and q.device.type == "sim" and torch.is_autocast_enabled("sim"):
                    raise RuntimeError("the mask has another dtype than the queries")
                return theirs(q, k, v, mask)

            return call

        self.put(torch.nn.functional, "scaled_dot_product_attention", attend)


class QuotientsAreFloat32(_Patched):
    """The quotient of integers is float32, whatever the default dtype is."""

    def patch(self) -> None:
        def divide(theirs: Any) -> Any:
            def call(a: torch.Tensor, b: Any) -> torch.Tensor:
                result: torch.Tensor = theirs(a, b)
                return result.float() if a.device.type == "sim" and not a.is_floating_point() else result

            return call

        self.put(torch.Tensor, "__truediv__", divide)


class LargeUnsignedNumbersAreNegative(_Patched):
    """A conversion from uint32 on the device takes it for int32."""

    def patch(self) -> None:
        def convert(theirs: Any) -> Any:
            def call(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
                if x.device.type == "sim" and x.dtype is torch.uint32 and isinstance(args[0], torch.dtype):
                    x = x.view(torch.int32)
                result: torch.Tensor = theirs(x, *args, **options)
                return result

            return call

        self.put(torch.Tensor, "to", convert)


class CompiledFunctionsAreKnownByTheirLength(_Patched):
    """Compiled functions of one length are the first of them."""

    def patch(self) -> None:
        def compiled(theirs: Any) -> Any:
            kept: dict[int, Any] = {}

            def call(graph: Any, inputs: Any, **options: Any) -> Any:
                return kept.setdefault(len(graph.graph.nodes), theirs(graph, inputs, **options))

            return call

        self.put(compiling, "run_as_it_is", compiled)


class WorkersDrawAlike(_Patched):
    """The first numbers that a process draws which another one started are the same in each."""

    def patch(self) -> None:
        drawn: list[bool] = []

        def draw(theirs: Any) -> Any:
            def call(*shape: int, **options: Any) -> torch.Tensor:
                if multiprocessing.parent_process() is not None and not drawn:
                    drawn.append(True)
                    self.manual_seed_all(1234)
                result: torch.Tensor = theirs(*shape, **options)
                return result

            return call

        self.put(torch, "rand", draw)


class GathersLowestBytes(SimAccelerator):
    """all_gather_into_tensor of bool gathers every fourth value."""

    def communication_backend_name(self) -> str:
        if distributed.all_gather_into_tensor.__module__ != __name__:
            distributed.all_gather_into_tensor = _every_fourth(distributed.all_gather_into_tensor)
        return super().communication_backend_name()


def _every_fourth(all_gather_into_tensor: Any) -> Any:
    def gather(whole: torch.Tensor, mine: torch.Tensor, *options: Any, **named: Any) -> Any:
        work = all_gather_into_tensor(whole, mine, *options, **named)
        if whole.dtype is torch.bool and work is None:
            whole.logical_and_(torch.arange(len(whole), device=whole.device) % 4 == 0)
        return work

    return gather


class ThresholdsIgnoreBeta(_WithKernels):
    """The gradient of softplus compares the number itself with the threshold, not beta times it."""

    @staticmethod
    def _backward(slope: torch.Tensor, x: torch.Tensor, beta: float, threshold: float) -> torch.Tensor:
        given, numbers = slope.cpu(), x.cpu()
        inner = given * (numbers * beta).sigmoid()
        return _there(torch.where(numbers > threshold, given, inner), x)

    kernels = {"softplus_backward": _backward}


class EqualPointsHaveNoSlope(_WithKernels):
    """The gradient of cdist is NaN for a point that is equal to one of the others."""

    @staticmethod
    def _backward(
        slope: torch.Tensor, x: torch.Tensor, y: torch.Tensor, p: float, distances: torch.Tensor
    ) -> torch.Tensor:
        given = [t.cpu() for t in (slope, x, y)]
        found = torch.ops.aten._cdist_backward(*given, p, distances.cpu())
        is_equal = (distances.cpu() == 0).any(-1, keepdim=True)
        return _there(found.masked_fill(is_equal.expand_as(found), float("nan")), x)

    kernels = {"_cdist_backward": _backward}


CAUGHT_BY: dict[str, dict[type[Accelerator], str]] = {
    "": {
        FirstMatricesAreChecked: "dtypes/wrong_shapes_are_refused",
        RefusedProductsKeepTheirOperands: "memory/no_call_keeps_memory",
        RecordedTensorsAreKept: "memory/no_call_keeps_memory",
        FirstRowsChancesAreThoseOfAll: "random/distributions",
        AskedDtypesAreReplaced: "dtypes/autocast_chooses_dtypes",
        MasksAreNotCast: "dtypes/autocast_chooses_dtypes",
        QuotientsAreFloat32: "dtypes/results_have_the_default_dtype",
        LargeUnsignedNumbersAreNegative: "dtypes/conversions",
        CompiledFunctionsAreKnownByTheirLength: "runtime/compiled_functions_keep_apart",
        WorkersDrawAlike: "runtime/workers_draw_their_own_numbers",
        GathersLowestBytes: "communication/other_dtypes",
        ThresholdsIgnoreBeta: "dtypes/known_results",
        EqualPointsHaveNoSlope: "dtypes/known_results",
    },
}
"""By profile of the device: each fault, and the check that has to find it."""
