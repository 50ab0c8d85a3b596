"""Faults planted in the CPU accelerator, one a class: the docstring says what is wrong.

`CAUGHT_BY` names the check that has to find each. Some checks start processes, which make the class anew from
this module.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, MutableMapping
from contextlib import AbstractContextManager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import torch

from acclimate.accelerator import Accelerator, DeviceLike, HostEvent, MixedPrecision
from acclimate.accelerator.recorded_graph import RecordedGraph
from acclimate.backends.cpu import CPUAccelerator

KIB, MIB = 2**10, 2**20

# -- devices -------------------------------------------------------------------------------------


class TextualCurrentDevice(CPUAccelerator):
    """The current device is a string."""

    def current_device(self) -> Any:
        return str(super().current_device())


class NoDeviceContext(CPUAccelerator):
    """device() gives None instead of a context manager."""

    def device(self, device_index: DeviceLike = None) -> Any:
        return None


class TakesForeignDevices(CPUAccelerator):
    """A device of another type counts as one of its own."""

    def _index(self, device: DeviceLike = None) -> int:
        return 0


class NoMemoryInProperties(CPUAccelerator):
    """The properties say that a device has 0 bytes of memory."""

    def get_device_properties(self, device: DeviceLike = None) -> Any:
        found = super().get_device_properties(device)
        return SimpleNamespace(**{**vars(found), "total_memory": 0})


class DeniesWhatFollows(CPUAccelerator):
    """It is synchronous, and says that the host's clock does not measure its work."""

    def use_host_timers(self) -> bool:
        return False


# -- random numbers ------------------------------------------------------------------------------


class SeedsNothing(CPUAccelerator):
    """manual_seed does nothing."""

    def manual_seed(self, seed: int) -> None:
        pass


class SeedsNoDevice(CPUAccelerator):
    """manual_seed_all does nothing."""

    def manual_seed_all(self, seed: int) -> None:
        pass


class RestoresNothing(CPUAccelerator):
    """set_rng_state does nothing."""

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceLike = None) -> None:
        pass


class RestoresOnlyTheCurrentDevice(CPUAccelerator):
    """set_rng_state raises when a device is named."""

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceLike = None) -> None:
        if device_index is not None:
            raise TypeError("set_rng_state() got an unexpected device")
        super().set_rng_state(new_state)


class SeedsAlwaysAlike(CPUAccelerator):
    """seed() gives the same number each time."""

    def seed(self) -> int:
        self.manual_seed(4)
        return 4


class ForeignGenerator(CPUAccelerator):
    """The default generator is one that nothing draws from."""

    def default_generator(self, device_index: DeviceLike = None) -> torch.Generator:
        return torch.Generator()


# -- streams -------------------------------------------------------------------------------------


class _StandingClock(HostEvent):
    def elapsed_time(self, end_event: HostEvent) -> float:
        super().elapsed_time(end_event)
        return 0.0


class EventsMeasureNothing(CPUAccelerator):
    """The time between two events is 0."""

    Event = _StandingClock


class _Seconds(HostEvent):
    def elapsed_time(self, end_event: HostEvent) -> float:
        return super().elapsed_time(end_event) / 1000


class EventsMeasureSeconds(CPUAccelerator):
    """The time between two events is in seconds."""

    Event = _Seconds


class StreamsForgotten(CPUAccelerator):
    """stream() changes nothing."""

    def stream(self, stream: Any | None) -> AbstractContextManager[Any]:
        return nullcontext()


class SetStreamForgotten(CPUAccelerator):
    """set_stream does nothing."""

    def set_stream(self, stream: Any | None) -> None:
        pass


# -- memory --------------------------------------------------------------------------------------


class Leaks(CPUAccelerator):
    """Each empty_cache() keeps 8 MiB for ever."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def empty_cache(self) -> None:
        self._kept.append(torch.ones(8 * MIB, dtype=torch.uint8))


class AllocatedNeverFalls(CPUAccelerator):
    """memory_allocated is the most that there ever was."""

    def memory_allocated(self, device_index: DeviceLike = None) -> int:
        self._most = max(getattr(self, "_most", 0), super().memory_allocated(device_index))
        return self._most


class AllocatedInKibibytes(CPUAccelerator):
    """memory_allocated is in KiB."""

    def memory_allocated(self, device_index: DeviceLike = None) -> int:
        return super().memory_allocated(device_index) // KIB


class PeakIsNow(CPUAccelerator):
    """The peak is what is allocated now."""

    def max_memory_allocated(self, device_index: DeviceLike = None) -> int:
        return self.memory_allocated(device_index)


class PeakNeverResets(CPUAccelerator):
    """reset_peak_memory_stats does nothing, and the peak is the highest ever seen."""

    def reset_peak_memory_stats(self, device_index: DeviceLike = None) -> None:
        pass


class StatisticsNeverFall(CPUAccelerator):
    """memory_stats counts what was ever allocated as allocated now."""

    def memory_stats(self, device_index: DeviceLike = None) -> dict[str, Any]:
        found = super().memory_stats(device_index)
        self._most = max(getattr(self, "_most", 0), found["allocated_bytes.all.current"])
        return {**found, "allocated_bytes.all.current": self._most}


class EndlessMemory(CPUAccelerator):
    """What is available never falls."""

    def _memory_info(self, index: int) -> tuple[int, int]:
        total = super()._memory_info(index)[1]
        return total, total


class DeniesOutOfMemory(CPUAccelerator):
    """is_out_of_memory recognises no error of the host's allocator."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, self.OutOfMemoryError)


class EverythingIsOutOfMemory(CPUAccelerator):
    """Any RuntimeError counts as out of memory."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError)


class OutOfMemoryOfWrongType(CPUAccelerator):
    """OutOfMemoryError is Python's MemoryError, which no handler of torch's errors catches."""

    OutOfMemoryError = MemoryError  # type: ignore[assignment]


# -- data types ----------------------------------------------------------------------------------


class ClaimsFloat8(CPUAccelerator):
    """supported_dtypes has a type that cannot be multiplied."""

    def supported_dtypes(self) -> list[torch.dtype]:
        return [*super().supported_dtypes(), torch.float8_e4m3fn]


class DeniesFloat64(CPUAccelerator):
    """It computes in float64, and leaves that out."""

    def is_fp64_supported(self) -> bool:
        return False


class ListAndAnswerDiffer(CPUAccelerator):
    """is_bf16_supported is true, and supported_dtypes lacks bfloat16."""

    def supported_dtypes(self) -> list[torch.dtype]:
        return [dtype for dtype in super().supported_dtypes() if dtype != torch.bfloat16]


class MixedPrecisionElsewhere(CPUAccelerator):
    """amp is that of another device."""

    @property
    def amp(self) -> MixedPrecision:
        return MixedPrecision("xpu")


class WrongTensorType(CPUAccelerator):
    """LongTensor makes int32 tensors."""

    @property
    def LongTensor(self) -> Any:
        return self.IntTensor


# -- graphs --------------------------------------------------------------------------------------


class ReplaysNothing(CPUAccelerator):
    """replay_graph does nothing."""

    def replay_graph(self, graph: Any) -> None:
        pass


class ReplaysOnce(CPUAccelerator):
    """Only the first replay of a graph does anything."""

    def replay_graph(self, graph: Any) -> None:
        if not getattr(graph, "replayed", False):
            super().replay_graph(graph)
        graph.replayed = True


class CaptureNotTold(CPUAccelerator):
    """is_current_stream_capturing is always false."""

    def is_current_stream_capturing(self) -> bool:
        return False


class CapturesNothing(CPUAccelerator):
    """A capture records nothing and refuses nothing, and its replay says nothing."""

    def create_graph(self) -> Any:
        graph = RecordedGraph()
        graph._calls = []
        return graph

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return nullcontext()


# -- pinned memory -------------------------------------------------------------------------------


class PinsByName(CPUAccelerator):
    """is_pinned is true of memory that is not locked."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return True


class PinsWithoutContents(CPUAccelerator):
    """pin_memory loses the tensor's values."""

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        return torch.zeros_like(super().pin_memory(tensor, make_copy, match_shape))


class RegistersByName(CPUAccelerator):
    """register_host_memory takes memory without locking it."""

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        return True


class EverythingIsHere(CPUAccelerator):
    """on_accelerator is true of every tensor."""

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return True


# -- ops -----------------------------------------------------------------------------------------


class BuilderNotMade(CPUAccelerator):
    """create_op_builder gives the class."""

    def create_op_builder(self, class_name: str) -> Any:
        return self.get_op_builder(class_name)


class UnknownOpsRaise(CPUAccelerator):
    """get_op_builder raises for an op that there is not."""

    def get_op_builder(self, class_name: str) -> Any:
        if class_name not in self.op_builders:
            raise KeyError(class_name)
        return super().get_op_builder(class_name)


class VersionAsNumbers(CPUAccelerator):
    """The toolkit's version is a tuple."""

    def toolkit_version(self) -> Any:
        return 8, 2


class IdleAdamBuilder:
    """A builder of an Adam that leaves the parameters as they are."""

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def load(self, verbose: bool = False) -> Any:
        functions = ("create_adam", "adam_update", "destroy_adam")
        return SimpleNamespace(**dict.fromkeys(functions, lambda *args: 0))


class WrongNumbers(CPUAccelerator):
    """Its Adam updates nothing."""

    op_builders = {"CPUAdamBuilder": f"{__name__}:IdleAdamBuilder"}  # noqa: RUF012


class CompilerThatFails(CPUAccelerator):
    """op_compiler names a program that compiles nothing."""

    def op_compiler(self, suffix: str = ".cpp") -> list[str]:
        return ["/bin/false"] if suffix == ".cpp" else super().op_compiler(suffix)


# -- runtime -------------------------------------------------------------------------------------


class CompilesWrongly(CPUAccelerator):
    """Its compile backend gives other numbers than the function."""

    def get_compile_backend(self) -> str:
        from torch._dynamo import list_backends, register_backend

        name = "acclimate_wrong"
        if name not in list_backends(exclude_tags=()):

            def wrong(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
                return lambda *args: [result * 1.5 for result in module(*args)]

            register_backend(wrong, name=name)
        return name


class CompilesForCopies(CPUAccelerator):
    """Its compile backend computes on copies of the inputs, which do not change."""

    def get_compile_backend(self) -> str:
        from torch._dynamo import list_backends, register_backend

        name = "acclimate_copying"
        if name not in list_backends(exclude_tags=()):

            def copying(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
                return lambda *given: module(
                    *(g.clone() if isinstance(g, torch.Tensor) else g for g in given)
                )

            register_backend(copying, name=name)
        return name


class CompilesTheLastResult(CPUAccelerator):
    """Its compile backend returns the last result if it gets the same tensors again."""

    def get_compile_backend(self) -> str:
        from torch._dynamo import list_backends, register_backend

        name = "acclimate_repeating"
        if name not in list_backends(exclude_tags=()):

            def repeating(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
                kept: dict[tuple[int, ...], Any] = {}

                def call(*given: Any) -> Any:
                    places = tuple(g.data_ptr() for g in given if isinstance(g, torch.Tensor))
                    if places not in kept:
                        kept[places] = module(*given)
                    return kept[places]

                return call

            register_backend(repeating, name=name)
        return name


class CompileBackendForgotten(CPUAccelerator):
    """set_compile_backend takes any name and keeps none."""

    def set_compile_backend(self, backend: str) -> None:
        pass


class LazyErrorsVanish(CPUAccelerator):
    """lazy_call suppresses errors of what it calls."""

    def lazy_call(self, callback: Any) -> None:
        with suppress(Exception):
            callback()


class NeverCalls(CPUAccelerator):
    """lazy_call never calls."""

    def lazy_call(self, callback: Any) -> None:
        pass


class ClaimsTriton(CPUAccelerator):
    """It says that Triton kernels run on it."""

    def is_triton_supported(self) -> bool:
        return True


class WrongSignature(CPUAccelerator):
    """memory_allocated takes no device."""

    def memory_allocated(self) -> int:  # type: ignore[override]
        return super().memory_allocated()


# -- communication -------------------------------------------------------------------------------


class NobodysBackend(CPUAccelerator):
    """The communication backend is a name that torch does not know."""

    communication_backend = "carrier-pigeon"  # type: ignore[assignment]


class ReducesNothing(CPUAccelerator):
    """Its communication backend leaves every tensor as it was."""

    @property
    def communication_backend(self) -> str:
        # torch's own stand-in for tests of programs at a scale that one machine does not have.
        from torch.testing._internal.distributed import fake_pg  # noqa: F401

        return "fake"


# -- launching -----------------------------------------------------------------------------------


class LimitsThisProcess(CPUAccelerator):
    """set_visible_devices_envs changes the environment of this process."""

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Iterable[int | str]
    ) -> None:
        os.environ["ACCLIMATE_PLANTED_DEVICES"] = ",".join(map(str, local_accelerator_ids))


class ExportsEverything(CPUAccelerator):
    """export_envs says that every variable is needed on other hosts."""

    def export_envs(self) -> list[str]:
        return [""]


class RankBeyondTheLast(CPUAccelerator):
    """In a launched rank the current device is LOCAL_RANK, of one device."""

    def device_count(self) -> int:
        return 1


class SpoiledByFork(CPUAccelerator):
    """Counting devices starts a context, with which a forked process cannot compute."""

    owner: int | None = None

    def device_count(self) -> int:
        SpoiledByFork.owner = SpoiledByFork.owner or os.getpid()
        return super().device_count()

    def synchronize(self, device_index: DeviceLike = None) -> None:
        if SpoiledByFork.owner not in (None, os.getpid()):
            raise RuntimeError("Cannot re-initialize the device in forked subprocess.")


class CrashesAtDtypes(CPUAccelerator):
    """Asked for its dtypes, it ends the process with SIGSEGV."""

    def supported_dtypes(self) -> list[torch.dtype]:
        import ctypes

        ctypes.string_at(0)
        return super().supported_dtypes()


class NeverReturns(CPUAccelerator):
    """empty_cache does not return."""

    def empty_cache(self) -> None:
        while True:
            time.sleep(1)


class NeverMeets(CPUAccelerator):
    """A rank that asks for the communication backend waits for ever."""

    def communication_backend_name(self) -> str:
        while True:
            time.sleep(1)


CAUGHT_BY: dict[type[Accelerator], str] = {
    TextualCurrentDevice: "devices/counts",
    NoDeviceContext: "devices/device_context",
    TakesForeignDevices: "devices/absent_devices",
    NoMemoryInProperties: "devices/properties",
    DeniesWhatFollows: "devices/synchronous_claim",
    SeedsNothing: "random/seeds",
    SeedsNoDevice: "random/seeds_of_all_devices",
    RestoresNothing: "random/state_saved_and_restored",
    RestoresOnlyTheCurrentDevice: "random/states_of_all_devices",
    SeedsAlwaysAlike: "random/fresh_seeds",
    ForeignGenerator: "random/generators",
    EventsMeasureNothing: "streams/events_measure_time",
    EventsMeasureSeconds: "streams/events_measure_time",
    StreamsForgotten: "streams/current_stream",
    SetStreamForgotten: "streams/set_stream",
    Leaks: "memory/nothing_leaks",
    AllocatedNeverFalls: "memory/allocation_shows",
    AllocatedInKibibytes: "memory/allocation_shows",
    PeakIsNow: "memory/peak",
    PeakNeverResets: "memory/peak_reset",
    StatisticsNeverFall: "memory/statistics",
    EndlessMemory: "memory/capacity",
    DeniesOutOfMemory: "memory/out_of_memory",
    EverythingIsOutOfMemory: "memory/out_of_memory",
    OutOfMemoryOfWrongType: "memory/out_of_memory",
    WrongSignature: "memory/signatures",
    ClaimsFloat8: "dtypes/products",
    DeniesFloat64: "dtypes/left_out_dtypes",
    ListAndAnswerDiffer: "dtypes/list_of_dtypes",
    MixedPrecisionElsewhere: "dtypes/autocast",
    WrongTensorType: "dtypes/tensor_classes",
    ReplaysNothing: "graphs/replay_follows_inputs",
    ReplaysOnce: "graphs/replay_repeats_updates",
    CaptureNotTold: "graphs/capture_is_told",
    CapturesNothing: "graphs/host_reads_refused",
    PinsByName: "pinning/told_truly",
    PinsWithoutContents: "pinning/contents",
    RegistersByName: "pinning/registration",
    EverythingIsHere: "pinning/on_accelerator",
    BuilderNotMade: "ops/builders_found",
    UnknownOpsRaise: "ops/builders_found",
    VersionAsNumbers: "ops/toolkit",
    WrongNumbers: "ops/optimizer_ops_compute",
    CompilerThatFails: "ops/toolchain",
    CompilesWrongly: "runtime/compiles",
    CompileBackendForgotten: "runtime/compile_backend_chosen",
    NeverCalls: "runtime/lazy_calls",
    LazyErrorsVanish: "runtime/lazy_calls",
    CompilesForCopies: "runtime/compiled_functions_have_effects",
    CompilesTheLastResult: "runtime/compiled_functions_have_effects",
    ClaimsTriton: "runtime/triton",
    NobodysBackend: "communication/backend_name",
    ReducesNothing: "communication/collectives",
    LimitsThisProcess: "launching/visible_devices",
    ExportsEverything: "launching/exported_variables",
    RankBeyondTheLast: "launching/launched_rank",
    SpoiledByFork: "launching/fork_after_selection",
}
"""Each fault, and the check that has to find it."""

ENDS_THE_WORKER: dict[type[Accelerator], str] = {
    CrashesAtDtypes: "dtypes/list_of_dtypes",
    NeverReturns: "memory/allocation_shows",
    NeverMeets: "communication/collectives",
}
"""Faults that end or block the process of the check that meets them."""
