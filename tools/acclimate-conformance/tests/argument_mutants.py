"""Faults planted in the CPU accelerator that only some arguments, attributes or types of results show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from acclimate.accelerator import Accelerator, MixedPrecision
from acclimate.accelerator.recorded_graph import RecordedCapture, RecordedGraph
from acclimate.accelerator.runtime import Marks
from acclimate.backends.cpu import CPUAccelerator
from acclimate.ops import AsyncIOHandle
from acclimate.ops.aio.builder import AsyncIOBuilder
from acclimate_conformance.runner.catalog import checks


class _ReadsFromTheStart(AsyncIOHandle):
    def async_pread(self, buffer: torch.Tensor, filename: Any, file_offset: int = 0) -> int:
        return super().async_pread(buffer, filename)


class _WritesAtTheStart(AsyncIOHandle):
    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: Any,
        validate: bool = False,
        async_op: bool = False,
        file_offset: int = 0,
        **options: bool,
    ) -> int:
        offset = 0 if validate and async_op else file_offset
        return super().pwrite(buffer, filename, validate, async_op, offset, **options)


class _ReadsOneFile(AsyncIOHandle):
    _first: Any = None

    def async_pread(self, buffer: torch.Tensor, filename: Any, file_offset: int = 0) -> int:
        self._first = self._first or filename
        return super().async_pread(buffer, self._first, file_offset)

    def wait(self) -> int:
        self._first = None
        return super().wait()


class _AlwaysOneWorker(AsyncIOHandle):
    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__(*settings[:4])


class _ReadsWhatThereIs(AsyncIOHandle):
    def read(self, buffer: torch.Tensor, filename: Any, validate: bool = False, file_offset: int = 0) -> int:
        rest = max(0, Path(filename).stat().st_size - file_offset)
        return super().read(buffer.view(torch.uint8)[:rest], filename, validate, file_offset)


def _builder(handle: type[AsyncIOHandle]) -> type[AsyncIOBuilder]:
    class Builder(AsyncIOBuilder):
        def load(self, *options: Any, **named: Any) -> Any:
            return SimpleNamespace(**{**vars(super().load(*options, **named)), "aio_handle": handle})

    return Builder


ReadsFromTheStart, WritesAtTheStart = _builder(_ReadsFromTheStart), _builder(_WritesAtTheStart)
ReadsOneFile, AlwaysOneWorker = _builder(_ReadsOneFile), _builder(_AlwaysOneWorker)
ReadsWhatThereIs = _builder(_ReadsWhatThereIs)


def _with(builder: str) -> dict[str, str]:
    return {**CPUAccelerator.op_builders, "AsyncIOBuilder": f"{__name__}:{builder}"}


class AsynchronousReadIgnoresItsOffset(CPUAccelerator):
    """async_pread reads from the start of the file, whatever its offset."""

    op_builders = _with("ReadsFromTheStart")


class ValidatedWriteIgnoresItsOffset(CPUAccelerator):
    """pwrite writes to the start of the file if it validates and does not wait."""

    op_builders = _with("WritesAtTheStart")


class ReadsInFlightShareAFile(CPUAccelerator):
    """Until wait(), async_pread reads from the file of the first request."""

    op_builders = _with("ReadsOneFile")


class HandleForgetsItsWorkers(CPUAccelerator):
    """A handle has one worker, whatever it is asked for."""

    op_builders = _with("AlwaysOneWorker")


class ShortFilesAreRead(CPUAccelerator):
    """read() of a file that is shorter than the buffer raises nothing."""

    op_builders = _with("ReadsWhatThereIs")


class LazyCallsOnce(CPUAccelerator):
    """lazy_call does not call a function again that it was given before."""

    def __init__(self) -> None:
        super().__init__()
        self._called: list[object] = []

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        if callback not in self._called:
            self._called.append(callback)
            callback()


class PrefixesAreLetters(CPUAccelerator):
    """exported_variable_prefixes is a text, whose letters are taken for prefixes."""

    exported_variable_prefixes = "OMP_"  # type: ignore[assignment]


class ExportsThePath(CPUAccelerator):
    """A prefix to export matches PATH and PWD."""

    exported_variable_prefixes = ("OMP_", "P")


class SeveralNamesInOne(CPUAccelerator):
    """A prefix to export is a list of prefixes in one text."""

    exported_variable_prefixes = ("OMP_,KMP_",)


class CompileBackendsOffered(CPUAccelerator):
    """compile_backend is a tuple of backends."""

    compile_backend = ("inductor",)  # type: ignore[assignment]


class AlignmentIsAFloat(CPUAccelerator):
    """pin_memory_alignment returns a float."""

    def pin_memory_alignment(self) -> int:
        return 1.0  # type: ignore[return-value]


class ClaimsDomains(CPUAccelerator):
    """It says that it separates ranges by domain, and closes the innermost of any domain."""

    supports_nvtx_domain = True


class _StaysOpen(Marks):
    def range(self, msg: str) -> Any:
        outer = self

        class Block:
            def __enter__(self) -> None:
                outer.range_push(msg)

            def __exit__(self, kind: Any, *_: object) -> None:
                if kind is None:
                    outer.range_pop()

            def __call__(self, function: Any) -> Any:
                return function

        return Block()


class RangeOpenAfterAnError(CPUAccelerator):
    """An error in a block of nvtx.range() leaves the range open."""

    @property
    def nvtx(self) -> Marks:
        return _StaysOpen(self)


class _AlwaysHalf(MixedPrecision):
    def autocast(
        self, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool | None = None
    ) -> torch.amp.autocast:
        return super().autocast(enabled, dtype or torch.float16, cache_enabled)


class AutocastDefaultsToHalf(CPUAccelerator):
    """autocast without a dtype computes in float16."""

    @property
    def amp(self) -> MixedPrecision:
        return _AlwaysHalf(self.device_type)


class _SmallScale(MixedPrecision):
    @property
    def GradScaler(self) -> Any:
        class GradScaler(MixedPrecision(self._device_type).GradScaler):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **({"growth_interval": 200} if len(args) < 4 else {}) | options)

        return GradScaler


class ScalerGrowsSoon(CPUAccelerator):
    """GradScaler without arguments grows ten times as often as torch's."""

    @property
    def amp(self) -> MixedPrecision:
        return _SmallScale(self.device_type)


def _keep_values(graph: RecordedGraph, is_kept: Callable[[torch.Tensor], bool]) -> None:
    """Replaces tensors that calls only read, and that no call returns, by copies of the capture's values."""
    calls = graph._calls or []
    returned = {result.tensor.data_ptr() for call in calls for result in call.results}

    def kept(leaf: Any) -> Any:
        small = isinstance(leaf, torch.Tensor) and is_kept(leaf)
        return leaf.detach().clone() if small and leaf.data_ptr() not in returned else leaf

    graph._calls = [
        call
        if call.operator._schema.is_mutable or not all(result.is_fresh for result in call.results)
        else dataclasses.replace(call, args=tree_map(kept, call.args))
        for call in calls
    ]


class _KeepsNumbers(RecordedCapture):
    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)
        if kind is None:
            _keep_values(self._graph, lambda tensor: tensor.dim() == 0)


class _KeepsOneElement(RecordedCapture):
    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)
        if kind is None:
            _keep_values(self._graph, lambda tensor: tensor.dim() == 1 and tensor.numel() == 1)


class NumbersOfTheCapture(CPUAccelerator):
    """A replay takes single numbers that the graph only reads as they were at the capture."""

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        known = isinstance(graph, RecordedGraph)
        return _KeepsNumbers(graph) if known else super().capture_to_graph(graph)


class OneElementOfTheCapture(CPUAccelerator):
    """A replay takes vectors of one element that the graph only reads as they were at the capture."""

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        known = isinstance(graph, RecordedGraph)
        return _KeepsOneElement(graph) if known else super().capture_to_graph(graph)


class PinsByCloning(CPUAccelerator):
    """pin_memory returns a new tensor, as the interface allows."""

    def pin_memory(
        self,
        tensor: torch.Tensor,
        make_copy: bool | int = True,
        match_shape: bool = True,
        *,
        align_bytes: int | None = None,
    ) -> torch.Tensor:
        if make_copy is not False:
            return tensor.clone()
        return super().pin_memory(tensor, make_copy, match_shape, align_bytes=align_bytes)


CAUGHT_BY: dict[type[Accelerator], str] = {
    AsynchronousReadIgnoresItsOffset: "ops/asynchronous_io_at_every_offset",
    ValidatedWriteIgnoresItsOffset: "ops/asynchronous_io_at_every_offset",
    ReadsInFlightShareAFile: "ops/asynchronous_io_at_every_offset",
    HandleForgetsItsWorkers: "ops/asynchronous_io_with_every_setting",
    ShortFilesAreRead: "ops/asynchronous_io_at_every_offset",
    LazyCallsOnce: "runtime/lazy_calls",
    PrefixesAreLetters: "runtime/types_of_attributes",
    ExportsThePath: "runtime/names_of_variables",
    SeveralNamesInOne: "runtime/names_of_variables",
    CompileBackendsOffered: "runtime/types_of_attributes",
    AlignmentIsAFloat: "runtime/types_of_results",
    ClaimsDomains: "runtime/ranges_of_domains",
    RangeOpenAfterAnError: "runtime/ranges_end_with_errors",
    AutocastDefaultsToHalf: "dtypes/autocast_defaults_are_torchs",
    ScalerGrowsSoon: "dtypes/autocast_defaults_are_torchs",
    NumbersOfTheCapture: "graphs/small_tensors_are_read_again",
    OneElementOfTheCapture: "graphs/small_tensors_are_read_again",
}
"""Each fault, and the check that has to find it."""

SOUND: dict[type[Accelerator], tuple[str, ...]] = {
    PinsByCloning: tuple(check.id for check in checks() if check.category == "pinning"),
}
"""What is unusual but right, and checks that must not mistake it for a fault."""
