"""More faults planted in the CPU accelerator: what errors leave behind, shared objects, second cases."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from acclimate.accelerator import Accelerator, DeviceLike, HostEvent, HostStream, MixedPrecision
from acclimate.accelerator.recorded_graph import RecordedCapture, RecordedGraph
from acclimate.backends.cpu import CPUAccelerator
from acclimate.ops.aio.builder import AsyncIOBuilder
from acclimate.ops.aio.handle import AsyncIOHandle


class NameOfNoRecord(CPUAccelerator):
    """Its name is "CPU", which no record has."""

    name = "CPU"


class DeviceHoldsErrorsBack(CPUAccelerator):
    """An error within device() does not come out of it."""

    @contextmanager
    def device(self, device_index: DeviceLike = None) -> Iterator[None]:
        with suppress(Exception):
            yield


class CapabilityBesideProperties(CPUAccelerator):
    """get_device_capability is (9, 0), and the properties say 0 and 0."""

    def get_device_capability(self, device: DeviceLike = None) -> tuple[int, int]:
        self._index(device)
        return 9, 0


class StatesThatLive(CPUAccelerator):
    """get_rng_state gives the same tensor each time, which changes with the next reading."""

    _kept: torch.Tensor | None = None

    def get_rng_state(self, device_index: DeviceLike = None) -> torch.Tensor:
        state = super().get_rng_state(device_index)
        if self._kept is None:
            self._kept = state
        return self._kept.copy_(state)


class SeedsOf32Bits(CPUAccelerator):
    """manual_seed drops all but 32 bits."""

    def manual_seed(self, seed: int) -> None:
        super().manual_seed(seed & 0xFFFFFFFF)


class RestoresNoneOfAll(CPUAccelerator):
    """set_rng_state_all does nothing."""

    def set_rng_state_all(self, new_states: Sequence[torch.Tensor]) -> None:
        pass


class StreamStaysAfterAnError(CPUAccelerator):
    """After an error within stream(s) the stream stays the current one."""

    @contextmanager
    def stream(self, stream: Any | None) -> Iterator[Any]:
        before = self.current_stream()
        self.set_stream(stream)
        yield stream
        self.set_stream(before)


class OneStreamForAllThreads(CPUAccelerator):
    """The current stream is one for all threads."""

    _current: Any = None

    def current_stream(self, device_index: DeviceLike = None) -> Any:
        self._index(device_index)
        return self._current or self.default_stream()

    @contextmanager
    def stream(self, stream: Any | None) -> Iterator[Any]:
        before, self._current = self._current, stream or self._current
        try:
            yield stream
        finally:
            self._current = before


class DefaultStreamIsTheCurrent(CPUAccelerator):
    """default_stream is whatever stream is current."""

    def default_stream(self, device_index: DeviceLike = None) -> Any:
        return self.current_stream(device_index) if self._inside else super().default_stream(device_index)

    _inside = False

    def stream(self, stream: Any | None) -> AbstractContextManager[Any]:
        type(self)._inside = True
        return super().stream(stream)


class _RecordedOnce(HostEvent):
    def record(self, stream: HostStream | None = None) -> None:
        if self._recorded_ns is None:
            super().record(stream)


class EventsRecordOnce(CPUAccelerator):
    """An event that is recorded again keeps its first time."""

    Event = _RecordedOnce


class _Untimed(HostEvent):
    def elapsed_time(self, end_event: HostEvent) -> float:
        return ((end_event._recorded_ns or 0) - (self._recorded_ns or 0)) / 1e6


class TimesWithoutTiming(CPUAccelerator):
    """elapsed_time answers for events that were not recorded, or do not measure time."""

    Event = _Untimed


class ReservedIsTheTotal(CPUAccelerator):
    """memory_reserved is the total memory."""

    def memory_reserved(self, device_index: DeviceLike = None) -> int:
        return self.total_memory(device_index)


class SummaryOfNothing(CPUAccelerator):
    """memory_summary says the same whatever is allocated."""

    def memory_summary(self, device: DeviceLike = None, abbreviated: bool = False) -> str:
        self._index(device)
        return "memory: fine"


class FreeAndTotalSwapped(CPUAccelerator):
    """mem_get_info gives the total first."""

    def mem_get_info(self, device: DeviceLike = None) -> tuple[int, int]:
        free, total = super().mem_get_info(device)
        return total, free


class _KeepsOnAfterErrors(MixedPrecision):
    @contextmanager
    def autocast(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        block = super().autocast(*args, **kwargs)
        block.__enter__()
        yield
        block.__exit__(None, None, None)


class AutocastStaysAfterAnError(CPUAccelerator):
    """After an error within autocast it stays on."""

    amp = _KeepsOnAfterErrors("cpu")  # type: ignore[assignment]


class _NoBackward(MixedPrecision):
    @property
    def custom_bwd(self) -> Any:
        return lambda function: function


class CustomBackwardForgotten(CPUAccelerator):
    """amp.custom_bwd leaves the function as it is."""

    amp = _NoBackward("cpu")  # type: ignore[assignment]


class ListOfDtypesIsShared(CPUAccelerator):
    """supported_dtypes gives the same list each time."""

    _dtypes: list[torch.dtype] | None = None

    def supported_dtypes(self) -> list[torch.dtype]:
        self._dtypes = self._dtypes or super().supported_dtypes()
        return self._dtypes


class _SameNumbers(RecordedGraph):
    _start: torch.Tensor | None = None

    def replay(self) -> None:
        self._start = torch.get_rng_state() if self._start is None else self._start
        torch.set_rng_state(self._start)
        super().replay()


class ReplaysTheSameNumbers(CPUAccelerator):
    """Each replay of a graph draws the numbers of the first."""

    def create_graph(self) -> Any:
        return _SameNumbers()


class ReplaysTheLatestGraph(CPUAccelerator):
    """replay_graph replays the graph that was made last."""

    _latest: Any = None

    def create_graph(self) -> Any:
        self._latest = super().create_graph()
        return self._latest

    def replay_graph(self, graph: Any) -> None:
        self._latest.replay()


class CapturesIntoAnything(CPUAccelerator):
    """capture_to_graph takes what is no graph."""

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return super().capture_to_graph(graph) if isinstance(graph, RecordedGraph) else nullcontext()


class DeniesTheGraphsItHas(CPUAccelerator):
    """supports_graphs is false, and create_graph makes one."""

    supports_graphs = False

    def create_graph(self) -> Any:
        return RecordedGraph()


class TemplateIsTheTensor(CPUAccelerator):
    """pin_memory without a copy gives the tensor itself."""

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        return tensor if match_shape else tensor.reshape(-1)


class PinsAsIfContiguous(CPUAccelerator):
    """pin_memory reads a strided tensor's memory in order."""

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        if not make_copy or tensor.is_contiguous():
            return super().pin_memory(tensor, make_copy, match_shape)
        return torch.as_strided(tensor, tensor.shape, torch.empty(tensor.shape).stride())


class CompilerWithoutItsPath(CPUAccelerator):
    """op_compiler gives a name instead of a path."""

    def op_compiler(self, suffix: str = ".cpp") -> list[str]:
        return ["c++"] if suffix == ".cpp" else super().op_compiler(suffix)


class RangesWithoutNames(CPUAccelerator):
    """Every profiler range has the same name."""

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        super().range_push("range", domain, category)


class OtherDefault(CPUAccelerator):
    """memory_stats takes device 0 by default, and not the current one."""

    def memory_stats(self, device_index: DeviceLike = 0) -> dict[str, Any]:
        return super().memory_stats(device_index)


class SeedsToldInPart(CPUAccelerator):
    """seed() returns the low 32 bits of the seed."""

    def seed(self) -> int:
        return super().seed() & 0xFFFFFFFF


class _DefaultDtype(MixedPrecision):
    def autocast(
        self, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool | None = None
    ) -> Any:
        return super().autocast(enabled, None, cache_enabled)


class AutocastToItsDefault(CPUAccelerator):
    """autocast computes in its default dtype, whichever is asked for."""

    @property
    def amp(self) -> MixedPrecision:
        return _DefaultDtype(self.device_type)


class _StepsAlways(MixedPrecision):
    @property
    def GradScaler(self) -> Any:
        class Scaler(MixedPrecision(self._device_type).GradScaler):
            def _maybe_opt_step(self, optimizer: Any, state: Any, *args: Any, **options: Any) -> Any:
                return optimizer.step(*args, **options)

        return Scaler


class ScalerStepsAlways(CPUAccelerator):
    """amp.GradScaler also steps with infinite gradients."""

    @property
    def amp(self) -> MixedPrecision:
        return _StepsAlways(self.device_type)


class _Appends(RecordedCapture):
    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        before = self._graph._calls or []
        super().__exit__(kind, value, trace)
        if kind is None:
            self._graph._calls = [*before, *(self._graph._calls or [])]


class SecondCaptureIsAppended(CPUAccelerator):
    """A second capture into a graph comes after the first one's work."""

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return _Appends(graph)


class _Keeps(RecordedCapture):
    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)
        self._graph._calls = self._calls


class FailedCaptureReplays(CPUAccelerator):
    """A capture that failed leaves a graph of what ran before the error."""

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return _Keeps(graph)


class ReadsAnyMemoryError(CPUAccelerator):
    """is_out_of_memory takes every error whose message has a shared memory in it."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return super().is_out_of_memory(error) or "shared memory" in str(error)


class PeakFallsToZero(CPUAccelerator):
    """After a reset the peak is 0."""

    def max_memory_allocated(self, device_index: DeviceLike = None) -> int:
        return 0


class RangesOfAllThreads(CPUAccelerator):
    """range_pop closes the range that was opened last, in whichever thread."""

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        mark = torch.profiler.record_function(msg)
        mark.__enter__()
        _open_ranges.append(mark)

    def range_pop(self, domain: str | None = None) -> None:
        if _open_ranges:
            _open_ranges.pop().__exit__(None, None, None)


_open_ranges: list[Any] = []


class _Truncating(AsyncIOHandle):
    def sync_pwrite(self, buffer: Any, filename: Any, file_offset: int = 0) -> int:
        if not file_offset:
            Path(filename).write_bytes(b"")
        return super().sync_pwrite(buffer, filename, file_offset)


class _Silent(AsyncIOHandle):
    def wait(self) -> int:
        try:
            return super().wait()
        except OSError:
            return 1


class TruncatingIO(AsyncIOBuilder):
    """Builds handles that cut a file off before they write its beginning."""

    def module(self) -> Any:
        return SimpleNamespace(**{**vars(super().module()), "aio_handle": _Truncating})


class SilentIO(AsyncIOBuilder):
    """Builds handles that keep errors to themselves."""

    def module(self) -> Any:
        return SimpleNamespace(**{**vars(super().module()), "aio_handle": _Silent})


class _ForgetsModes(AsyncIOHandle):
    def pwrite(self, buffer: torch.Tensor, filename: Any, *arguments: Any, **options: Any) -> int:
        result = super().pwrite(buffer, filename, *arguments, **options)
        if options.get("atomic"):
            Path(filename).chmod(0o600)
        return result


class ModelessIO(AsyncIOBuilder):
    """Builds handles whose new files have a mode of their own."""

    def module(self) -> Any:
        return SimpleNamespace(**{**vars(super().module()), "aio_handle": _ForgetsModes})


class ReplacedFilesLoseTheirMode(CPUAccelerator):
    """Asynchronous I/O that replaces a file forgets its mode."""

    op_builders: ClassVar = {**CPUAccelerator.op_builders, "AsyncIOBuilder": f"{__name__}:ModelessIO"}


class WritesCutFilesOff(CPUAccelerator):
    """Asynchronous I/O that writes the beginning of a file drops the rest of it."""

    op_builders: ClassVar = {**CPUAccelerator.op_builders, "AsyncIOBuilder": f"{__name__}:TruncatingIO"}


class WaitHidesErrors(CPUAccelerator):
    """Requests of asynchronous I/O that fail are not told."""

    op_builders: ClassVar = {**CPUAccelerator.op_builders, "AsyncIOBuilder": f"{__name__}:SilentIO"}


class BuildsTorchsExtensionsOnly(CPUAccelerator):
    """build_extension is torch's command, which cannot build op builders' extensions."""

    def build_extension(self) -> type[Any]:
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension


class StreamSetForAllThreads(CPUAccelerator):
    """set_stream sets the stream of all threads that have set none."""

    _set: Any = None

    def set_stream(self, stream: Any | None) -> None:
        super().set_stream(stream)
        self._set = stream or self._set

    def current_stream(self, device_index: DeviceLike = None) -> Any:
        own = super().current_stream(device_index)
        return self._set if self._set is not None and own is self.default_stream() else own


class LaunchedRankForgotten(CPUAccelerator):
    """current_device is 0 in every rank."""

    def current_device(self) -> int:
        return 0


class CrashesAtItsEnd(CPUAccelerator):
    """A rank that used a stream in a second thread is killed by a signal when its program returns."""

    def stream(self, stream: Any | None) -> AbstractContextManager[Any]:
        if "LOCAL_RANK" in os.environ and threading.current_thread() is not threading.main_thread():
            atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
        return super().stream(stream)


class IgnoresItsChildren(CPUAccelerator):
    """The exit codes of a rank's children are lost once it has streams."""

    def default_stream(self, device_index: DeviceLike = None) -> Any:
        if "LOCAL_RANK" in os.environ:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        return super().default_stream(device_index)


class RemembersOnlyGivenSeeds(CPUAccelerator):
    """initial_seed is the last one given to manual_seed."""

    _given: int | None = None

    def manual_seed(self, seed: int) -> None:
        super().manual_seed(seed)
        self._given = seed

    def initial_seed(self) -> int:
        return super().initial_seed() if self._given is None else self._given


class _GeneratorWithoutCopies(torch.Generator):
    """Its copies are itself."""

    def manual_seed(self, seed: int) -> torch.Generator:
        torch.default_generator.manual_seed(seed)
        return super().manual_seed(seed)

    def clone_state(self) -> torch.Generator:
        return self


class CopiesShareTheirState(CPUAccelerator):
    """A copy of the default generator changes the state of the original."""

    def default_generator(self, device_index: DeviceLike = None) -> torch.Generator:
        self._index(device_index)
        return _GeneratorWithoutCopies()


class _First256(RecordedGraph):
    @property
    def _calls(self) -> Any:
        return self._kept

    @_calls.setter
    def _calls(self, calls: Any) -> None:
        self._kept = calls and calls[:256]


class GraphsHold256Calls(CPUAccelerator):
    """A graph holds its first 256 calls."""

    def create_graph(self) -> Any:
        return _First256()


CAUGHT_BY: dict[type[Accelerator], str] = {
    NameOfNoRecord: "devices/names",
    DeviceHoldsErrorsBack: "devices/device_context",
    CapabilityBesideProperties: "devices/properties",
    StatesThatLive: "random/states_are_copies",
    SeedsOf32Bits: "random/seeds_of_every_size",
    RestoresNoneOfAll: "random/states_of_all_devices",
    StreamStaysAfterAnError: "streams/stream_context_ends",
    OneStreamForAllThreads: "streams/current_stream_of_a_thread",
    DefaultStreamIsTheCurrent: "streams/stream_context_ends",
    EventsRecordOnce: "streams/event_times_add_up",
    TimesWithoutTiming: "streams/events_without_timing",
    ReservedIsTheTotal: "memory/reserved_follows_allocations",
    SummaryOfNothing: "memory/summary",
    FreeAndTotalSwapped: "memory/capacity_agrees",
    AutocastStaysAfterAnError: "dtypes/autocast_ends",
    CustomBackwardForgotten: "dtypes/custom_functions",
    ListOfDtypesIsShared: "dtypes/tensor_classes_are_exact",
    ReplaysTheSameNumbers: "graphs/replays_draw_new_numbers",
    ReplaysTheLatestGraph: "graphs/graphs_are_independent",
    CapturesIntoAnything: "graphs/what_is_no_graph_is_refused",
    DeniesTheGraphsItHas: "graphs/replay_follows_inputs",
    TemplateIsTheTensor: "pinning/templates",
    PinsAsIfContiguous: "pinning/any_tensor_is_pinned",
    CompilerWithoutItsPath: "ops/toolchain",
    RangesWithoutNames: "runtime/profiler_marks",
    OtherDefault: "memory/signatures",
    SeedsToldInPart: "random/fresh_seeds",
    AutocastToItsDefault: "dtypes/autocast_to_the_dtype_asked_for",
    ScalerStepsAlways: "dtypes/scaler_skips_infinite_gradients",
    SecondCaptureIsAppended: "graphs/second_capture_replaces",
    FailedCaptureReplays: "graphs/capture_ends_after_an_error",
    ReadsAnyMemoryError: "memory/out_of_memory",
    PeakFallsToZero: "memory/peak_reset",
    RangesOfAllThreads: "runtime/ranges_of_threads",
    ReplacedFilesLoseTheirMode: "ops/asynchronous_io_moves_bytes",
    WritesCutFilesOff: "ops/asynchronous_io_moves_bytes",
    WaitHidesErrors: "ops/asynchronous_io_moves_bytes",
    BuildsTorchsExtensionsOnly: "ops/ahead_of_time",
    StreamSetForAllThreads: "streams/current_stream_of_a_thread",
    LaunchedRankForgotten: "launching/launched_rank",
    CrashesAtItsEnd: "launching/launched_rank",
    IgnoresItsChildren: "launching/first_use",
    RemembersOnlyGivenSeeds: "random/last_seed_is_told",
    CopiesShareTheirState: "random/generators",
    GraphsHold256Calls: "graphs/replay_repeats_updates",
}
"""Each fault, and the check that has to find it."""
