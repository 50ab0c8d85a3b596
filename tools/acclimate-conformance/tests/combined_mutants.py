"""Faults planted where features meet: graphs and data, compilers and checkpoints, arrays and pinning."""

# ruff: noqa: RUF012

from __future__ import annotations

from typing import Any

import torch

from acclimate.accelerator import Accelerator, recorded_graph
from acclimate_sim import compiling
from acclimate_sim.accelerator import SimAccelerator
from bounds_mutants import _Patched
from operator_mutants import _there, _WithKernels


class DataOfCapturesChanges(_Patched):
    """What a capture makes of Python's data keeps its changes from replay to replay."""

    def patch(self) -> None:
        def dispatch(theirs: Any) -> Any:
            def call(
                capture: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:  # as if it were memory of another library
                if func is torch.ops.aten.lift_fresh.default:
                    return func(*args, **(kwargs or {}))
                return theirs(capture, func, types, args, kwargs)

            return call

        self.put(recorded_graph.RecordedCapture, "__torch_dispatch__", dispatch)


class CompiledCheckpointsDrawAnew(_Patched):
    """A checkpoint within a compiled function draws other numbers in backward()."""

    def patch(self) -> None:
        self.put(compiling, "_has_checkpoints", lambda theirs: lambda graph: False)


class CompiledFunctionsKnowNoAutocast(_Patched):
    """A compiled function computes as if autocast were off."""

    def patch(self) -> None:
        def compiled(theirs: Any) -> Any:
            def call(graph: Any, inputs: Any, **options: Any) -> Any:
                forward = theirs(graph, inputs, **options)

                def run(*args: Any) -> Any:
                    with torch.autocast("sim", enabled=False):
                        return forward(*args)

                return run

            return call

        self.put(compiling, "run_as_it_is", compiled)


class PinnedMemoryIsItsFirstByte(SimAccelerator):
    """Memory is pinned if its storage begins where pinned memory begins."""

    def __init__(self) -> None:
        super().__init__()
        self._begins: set[int] = set()

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        pinned = super().pin_memory(tensor, make_copy, match_shape)
        self._begins.add(pinned.untyped_storage().data_ptr())
        return pinned

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return super().is_pinned(tensor) and tensor.untyped_storage().data_ptr() in self._begins


class PlacesOf31Bits(_WithKernels):
    """index_select takes the lowest 31 bits of a place."""

    @staticmethod
    def _select(x: torch.Tensor, dim: int, places: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.narrow(dim, n % (1 << 31), 1) for n in places.tolist()], dim)

    kernels = {"index_select": _select}


class NumbersOfTheHostBeginTheirStorage(_Patched):
    """A number of the host beside a tensor is read from the begin of its storage."""

    def patch(self) -> None:
        def add(theirs: Any) -> Any:
            def call(a: Any, b: Any, *rest: Any, **options: Any) -> Any:
                if isinstance(b, torch.Tensor) and not b.dim() and b.device.type != a.device.type:
                    b = b.as_strided((), (), 0)
                return theirs(a, b, *rest, **options)

            return call

        self.put(torch.Tensor, "__add__", add)


class StridedPartsBeginTheStorage(_WithKernels):
    """as_strided without an offset begins where the storage does."""

    @staticmethod
    def _strided(x: torch.Tensor, size: Any, stride: Any, storage_offset: Any = None) -> torch.Tensor:
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(
            x.untyped_storage(), storage_offset or 0, size, stride
        )

    kernels = {"as_strided": _strided}


class TanhOfCellsIsSteeper(_WithKernels):
    """tanh of matrices, as within recurrent cells, is steeper."""

    kernels = {"tanh": lambda x: _there((x.cpu() * (1.5 if x.dim() == 2 else 1)).tanh(), x)}


class ColumnsTimesRowsAreOfTheFirstRows(_WithKernels):
    """A product of batches of columns and of rows takes the rows of the first batch for all."""

    @staticmethod
    def _mul(x: torch.Tensor, y: Any) -> torch.Tensor:
        ours, theirs = x.cpu(), torch.as_tensor(y, device="cpu")
        if ours.dim() == theirs.dim() == 3 and ours.shape[2] == theirs.shape[1] == 1 < theirs.shape[2]:
            theirs = theirs[:1]
        return _there(ours * (theirs if torch.is_tensor(y) else y), x if x.device.type == "sim" else y)

    kernels = {"mul.Tensor": _mul}


class FiguresLeaveTheDevice(_Patched):
    """mem_get_info(i) of torch's module, which get_device_properties() calls too, leaves device i current."""

    def patch(self) -> None:
        def told(theirs: Any) -> Any:
            def tell(device: Any = None) -> Any:
                if isinstance(device, int):
                    torch.accelerator.set_device_index(device)
                return theirs(device)

            return tell

        self.put(self.torch_module, "mem_get_info", told)


class GrowthIsEvery2000Steps(_Patched):
    """GradScaler ignores growth_interval."""

    def patch(self) -> None:
        def init(theirs: Any) -> Any:
            def call(scaler: Any, *args: Any, **options: Any) -> None:
                theirs(scaler, *args, **{**options, "growth_interval": 2000})

            return call

        self.put(self.amp.GradScaler, "__init__", init)


class _OnTheFirst(torch.Stream):
    def __new__(cls, device: Any = None, **options: Any) -> _OnTheFirst:
        return super().__new__(cls, "sim:0", **options)


class StreamsAreOfTheFirstDevice(SimAccelerator):
    """A new stream is one of device 0, whichever device is named or current."""

    Stream = _OnTheFirst


CAUGHT_BY: dict[str, dict[type[Accelerator], str]] = {
    "": {
        DataOfCapturesChanges: "graphs/what_a_capture_makes_is_made_anew",
        CompiledCheckpointsDrawAnew: "runtime/checkpoints_draw_again",
        CompiledFunctionsKnowNoAutocast: "runtime/compiled_functions_follow_their_surroundings",
        PinnedMemoryIsItsFirstByte: "pinning/pinned_memory_is_seen_otherwise",
        PlacesOf31Bits: "dtypes/places_beyond_31_bits",
        NumbersOfTheHostBeginTheirStorage: "runtime/features_meet",
        StridedPartsBeginTheStorage: "runtime/features_meet",
        TanhOfCellsIsSteeper: "dtypes/layers_with_options",
        ColumnsTimesRowsAreOfTheFirstRows: "runtime/transformed_programs",
        FiguresLeaveTheDevice: "devices/properties",
        GrowthIsEvery2000Steps: "dtypes/scaler_by_its_arguments",
        StreamsAreOfTheFirstDevice: "streams/set_stream",
    },
}
"""By profile of the device: each fault, and the check that has to find it."""
NAMED: dict[str, str] = {
    "PinnedMemoryIsItsFirstByte": "is_pinned",
    "DataOfCapturesChanges": "replay_graph",
    "PlacesOf31Bits": "index_select",
    "StridedPartsBeginTheStorage": "as_strided",
    "TanhOfCellsIsSteeper": "tanh",
    "GrowthIsEvery2000Steps": "amp",
    "FiguresLeaveTheDevice": "mem_get_info",
    "StreamsAreOfTheFirstDevice": "Stream",
}
"""For some of them, the name that the report has to give first."""
