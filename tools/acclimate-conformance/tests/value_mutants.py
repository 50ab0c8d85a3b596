"""Faults planted in the CPU accelerator that show only on a second call, elsewhere or for hard values."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch

from acclimate.accelerator import Accelerator, DeviceLike, HostEvent, MixedPrecision
from acclimate.accelerator.recorded_graph import RecordedCapture, RecordedGraph
from acclimate.backends.cpu import CPUAccelerator


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class RestoresInTheMainThreadOnly(CPUAccelerator):
    """set_rng_state does nothing in threads but the main one."""

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceLike = None) -> None:
        if _in_main_thread():
            super().set_rng_state(new_state, device_index)


class PropertiesChangeTheEnvironment(CPUAccelerator):
    """get_device_properties sets a variable that the user had set."""

    def get_device_properties(self, device: DeviceLike = None) -> Any:
        os.environ["PATH"] += os.pathsep
        return super().get_device_properties(device)


class StreamBlockOfWhereItWasMade(CPUAccelerator):
    """After stream(s) the stream is current that was so when the block was made."""

    def stream(self, stream: Any | None) -> AbstractContextManager[Any]:
        before = self.current_stream()

        @contextmanager
        def block() -> Iterator[Any]:
            self.set_stream(stream)
            try:
                yield stream
            finally:
                self.set_stream(before)

        return block()


class OneListOfIncludes(CPUAccelerator):
    """op_include_paths returns one list, each time."""

    _folders: ClassVar[list[str]] = []

    def op_include_paths(self) -> list[str]:
        return self._folders


class CompileBackendOfAThread(CPUAccelerator):
    """Each thread has its own compile backend."""

    _of_thread: ClassVar[Any] = threading.local()

    def set_compile_backend(self, backend: str) -> None:
        super().set_compile_backend(backend)
        self._of_thread.backend = backend

    def get_compile_backend(self) -> str:
        return getattr(self._of_thread, "backend", "inductor")


class KeepsPinnedMemory(CPUAccelerator):
    """Every tensor that pin_empty made is kept."""

    _made: ClassVar[list[torch.Tensor]] = []

    def pin_empty(
        self, *size: int | Sequence[int], dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        self._made.append(super().pin_empty(*size, dtype=dtype, device=device))
        return self._made[-1]


class IntegersThroughFloat(CPUAccelerator):
    """IntTensor makes its integers from float32."""

    @property
    def IntTensor(self) -> Any:
        return lambda data: torch.tensor(data, dtype=torch.float32).to(torch.int32)


class _LosesTheGrowthCount(MixedPrecision):
    @property
    def GradScaler(self) -> type[torch.amp.GradScaler]:
        real = super().GradScaler

        class GradScaler(real):  # type: ignore[valid-type, misc]
            def state_dict(self) -> dict[str, Any]:
                return {**super().state_dict(), "_growth_tracker": 0}

        return GradScaler


class ScalerLosesItsCount(CPUAccelerator):
    """The state of a GradScaler leaves out how many good steps there were."""

    @property
    def amp(self) -> MixedPrecision:
        return _LosesTheGrowthCount("cpu")


class _AlwaysCaches(MixedPrecision):
    def autocast(
        self, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool | None = None
    ) -> torch.amp.autocast:
        return super().autocast(enabled, dtype, True)


class AutocastAlwaysCaches(CPUAccelerator):
    """autocast(cache_enabled=False) keeps the cache on."""

    @property
    def amp(self) -> MixedPrecision:
        return _AlwaysCaches("cpu")


class _CastsAllButTheLast(MixedPrecision):
    @property
    def custom_fwd(self) -> Any:
        real = super().custom_fwd

        def custom_fwd(function: Any = None, *, cast_inputs: Any = None) -> Any:
            def wrap(forward: Any) -> Any:
                def called(ctx: Any, *given: Any) -> Any:
                    inner = real(
                        lambda ctx, *front: forward(ctx, *front, *given[-1:]), cast_inputs=cast_inputs
                    )
                    return (
                        inner(ctx, *given[:-1])
                        if len(given) > 1
                        else real(forward, cast_inputs=cast_inputs)(ctx, *given)
                    )

                return called

            return wrap if function is None else real(function)

        return custom_fwd


class CastsAllButTheLast(CPUAccelerator):
    """custom_fwd(cast_inputs=…) leaves the last of several inputs as it is."""

    @property
    def amp(self) -> MixedPrecision:
        return _CastsAllButTheLast("cpu")


class _NeverBefore(HostEvent):
    def elapsed_time(self, end_event: HostEvent) -> float:
        return max(0.0, super().elapsed_time(end_event))


class TimesNeverNegative(CPUAccelerator):
    """The time from a later event to an earlier one is 0."""

    Event = _NeverBefore


class _OnlyItsThread(RecordedGraph):
    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def replay(self) -> None:
        if threading.get_ident() == self._thread:
            super().replay()


class ReplaysInOneThread(CPUAccelerator):
    """A replay in another thread does nothing."""

    def create_graph(self) -> Any:
        return _OnlyItsThread()


class _IntegersOnce(RecordedGraph):
    def replay(self) -> None:
        kept = []
        for call in self._calls or ():
            for result in call.results:
                if not result.tensor.is_floating_point():
                    kept.append((result.tensor, result.tensor.clone()))
        super().replay()
        for tensor, before in kept:
            tensor.copy_(before)


class IntegersOfTheCapture(CPUAccelerator):
    """A replay leaves results that are no floating-point numbers as the capture made them."""

    def create_graph(self) -> Any:
        return _IntegersOnce()


class _LetsTruthThrough(RecordedCapture):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return func(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)


class TruthMayBeRead(CPUAccelerator):
    """A truth value can be read back to the host during a capture."""

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return _LetsTruthThrough(graph)


class PinsAsked(CPUAccelerator):
    """pin_empty refuses a device other than the host only if it is given as text."""

    def pin_empty(
        self, *size: int | Sequence[int], dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        return super().pin_empty(*size, dtype=dtype, device=device if isinstance(device, str) else "cpu")


class BuildersInAnyCase(CPUAccelerator):
    """get_op_builder does not distinguish upper and lower case."""

    def get_op_builder(self, class_name: str) -> Any:
        names = {name.lower(): name for name in self.op_builders}
        return super().get_op_builder(names.get(class_name.lower(), class_name))


class PortableForThisProcessor(CPUAccelerator):
    """The flags for all devices name this machine's processor."""

    def op_compile_flags(self, suffix: str = ".cpp", portable: bool = False) -> list[str]:
        return [*super().op_compile_flags(suffix, portable), *(["-mcpu=native"] if portable else [])]


class CompilerAskedOnce(CPUAccelerator):
    """op_compiler reads CXX at its first call only."""

    _found: ClassVar[list[str]] = []

    def op_compiler(self, suffix: str = ".cpp") -> list[str]:
        if not self._found and suffix == ".cpp":
            self._found.extend(super().op_compiler(suffix))
        return [*self._found] if suffix == ".cpp" else super().op_compiler(suffix)


class RangesOfOneLine(CPUAccelerator):
    """The name of a range ends with its first line."""

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        super().range_push((msg.splitlines() or [""])[0], domain, category)


class LastLaunchedCount(CPUAccelerator):
    """device_count keeps the number of the launcher that it saw first."""

    _count = 0

    def device_count(self) -> int:
        self._count = self._count or super().device_count()
        return self._count


class OtherLaunchersCount(CPUAccelerator):
    """device_count prefers LOCAL_SIZE to LOCAL_WORLD_SIZE."""

    def device_count(self) -> int:
        size = os.environ.get("LOCAL_SIZE")
        return int(size) if size else super().device_count()


class UnavailableAfterAFork(CPUAccelerator):
    """is_available is False in a process forked from the one that made it."""

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    def is_available(self) -> bool:
        return os.getpid() == self._process


CAUGHT_BY: dict[type[Accelerator], str] = {
    RestoresInTheMainThreadOnly: "random/state_saved_and_restored",
    PropertiesChangeTheEnvironment: "devices/properties",
    StreamBlockOfWhereItWasMade: "devices/blocks_end_as_they_began",
    OneListOfIncludes: "runtime/results_are_the_callers",
    CompileBackendOfAThread: "runtime/compile_backend_of_all_threads",
    KeepsPinnedMemory: "memory/objects_die",
    IntegersThroughFloat: "dtypes/extreme_values",
    ScalerLosesItsCount: "dtypes/scaler_does_what_torchs_does",
    AutocastAlwaysCaches: "dtypes/autocast_can_be_used_again",
    CastsAllButTheLast: "dtypes/custom_functions_cast_every_input",
    TimesNeverNegative: "streams/event_times_add_up",
    ReplaysInOneThread: "graphs/graphs_replay_in_any_thread",
    IntegersOfTheCapture: "graphs/every_kind_of_input_is_read_again",
    TruthMayBeRead: "graphs/every_kind_of_read_is_refused",
    PinsAsked: "pinning/only_on_the_host",
    BuildersInAnyCase: "ops/builders_found",
    PortableForThisProcessor: "ops/toolchain_by_its_arguments",
    CompilerAskedOnce: "ops/toolchain_by_its_arguments",
    RangesOfOneLine: "runtime/names_of_ranges",
    OtherLaunchersCount: "launching/launched_rank",
    LastLaunchedCount: "launching/launched_rank",
    UnavailableAfterAFork: "launching/fork_after_selection",
}
"""Each fault, and the check that has to find it."""
