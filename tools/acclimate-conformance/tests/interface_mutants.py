"""Faults planted in the emulated device, each the mildest break of one sentence of the interface."""

# ruff: noqa: RUF012

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import distributed

from acclimate.accelerator import Accelerator, DeviceLike, mixed_precision, recorded_graph
from acclimate.accelerator.dtypes import TensorType
from acclimate.errors import GraphCaptureError
from acclimate_sim import sharing
from acclimate_sim.accelerator import SimAccelerator
from bounds_mutants import _Patched
from operator_mutants import _WithKernels

# -- graphs ----------------------------------------------------------------------------------------


class IntegersAreKeptAsTheyAre(_Patched):
    """A capture keeps the caller's integer tensors, whose shape may change after the call."""

    def patch(self) -> None:
        def make(theirs: Any) -> Any:
            def alias(value: Any) -> Any:
                is_kept = isinstance(value, torch.Tensor) and not value.is_floating_point()
                return value if is_kept else theirs(value)

            return alias

        self.put(recorded_graph, "_alias", make)


class SmallerResultsAreTaken(_Patched):
    """A replay whose result is smaller than that of the capture raises nothing."""

    def patch(self) -> None:
        def make(theirs: Any) -> Any:
            def take(held: Any, result: torch.Tensor, operator: Any) -> None:
                then = held.tensor
                if result.dim() == then.dim() and result.numel() < then.numel():
                    then[tuple(slice(length) for length in result.shape)].copy_(result)
                else:
                    theirs(held, result, operator)

            return take

        self.put(recorded_graph._Result, "take", make)


class LongResultsStayHalf(_Patched):
    """Of results of more than 64 KiB a replay fills the first 64."""

    def patch(self) -> None:
        def make(theirs: Any) -> Any:
            def take(held: Any, result: torch.Tensor, operator: Any) -> None:
                if held.is_fresh and result.dim() == 1 and result.nbytes > 1 << 16:
                    count = (1 << 16) // result.element_size()
                    held.tensor[:count].copy_(result[:count])
                else:
                    theirs(held, result, operator)

            return take

        self.put(recorded_graph._Result, "take", make)


class NearnessIsNoRead(_Patched):
    """torch.allclose in a capture raises nothing."""

    def patch(self) -> None:
        self.put(recorded_graph, "_ATEN_READERS", lambda theirs: theirs - {"allclose"})


class OperatorsOfProgramsAreLeftOut(_Patched):
    """Operators that the program adds to torch are not captured."""

    def patch(self) -> None:
        def make(theirs: Any) -> Any:
            def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func.namespace == "acclimate_conformance":
                    return func(*args, **(kwargs or {}))
                return theirs(mode, func, types, args, kwargs)

            return dispatch

        self.put(recorded_graph.RecordedCapture, "__torch_dispatch__", make)


class CapturesExcludeOtherThreads(SimAccelerator):
    """A capture is refused while another thread captures."""

    _thread: int | None = None

    @contextmanager
    def capture_to_graph(
        self, graph: Any, pool: Any | None = None, stream: Any | None = None
    ) -> Iterator[Any]:
        before, own = self._thread, threading.get_ident()
        if before not in (None, own):
            raise GraphCaptureError("another thread captures")
        self._thread = own
        try:
            with super().capture_to_graph(graph, pool, stream) as given:
                yield given
        finally:
            self._thread = before


# -- devices and streams ---------------------------------------------------------------------------


class DeepBlocksForget(SimAccelerator):
    """More than 6 blocks of device() within each other restore device 0."""

    _deep = threading.local()

    def device(self, device_index: DeviceLike = None) -> AbstractContextManager[Any]:
        return nullcontext() if device_index is None else self._counted(super().device(device_index))

    @contextmanager
    def _counted(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        self._deep.count = getattr(self._deep, "count", 0) + 1
        try:
            with inner:
                yield
        finally:
            if self._deep.count > 6:
                self.set_device(0)
            self._deep.count -= 1


class PositionsAreNoDevices(SimAccelerator):
    """Stream(device), without the argument's name, is made on the current device."""

    @property
    def Stream(self) -> type[Any]:
        return _OfNames


class _OfNames(torch.Stream):
    def __new__(cls, *device: Any, **options: Any) -> Any:
        return torch.Stream(**({"device": "sim"} if device or not options else options))


class StreamsEndEverywhere(SimAccelerator):
    """A stream keeps what was current before it in one place for all threads."""

    _before: dict[int, list[Any]] = {}

    def stream(self, stream: Any | None) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else self._block(stream)

    @contextmanager
    def _block(self, stream: Any) -> Iterator[Any]:
        device = self.current_device()
        self._before.setdefault(stream.stream_id, []).append(self.current_stream(stream.device_index))
        self.set_stream(stream)
        try:
            yield stream
        finally:
            self.set_stream(self._before[stream.stream_id].pop())
            self.set_device(device)


# -- random numbers --------------------------------------------------------------------------------


class LastStateIsForTheRest(SimAccelerator):
    """set_rng_state_all() of fewer states than devices gives the last to the others too."""

    def set_rng_state_all(self, new_states: Sequence[torch.Tensor]) -> None:
        states = list(new_states)
        super().set_rng_state_all(states + states[-1:] * (self.device_count() - len(states)))


class RowsOfNormalNumbersAreOne(_WithKernels):
    """torch.normal of a tensor of means draws one row for all."""

    @staticmethod
    def _drawn(mean: torch.Tensor, std: float = 1.0, *, generator: Any = None) -> torch.Tensor:
        row = torch.randn(mean.shape[-1:], device=mean.device, generator=generator)
        return mean + row.to(mean.dtype) * std

    kernels = {"normal.Tensor_float": _drawn}


# -- memory ----------------------------------------------------------------------------------------


class HostsErrorsAreUnknown(SimAccelerator):
    """is_out_of_memory() does not know the error of the host's allocator."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, self.OutOfMemoryError)


class SummariesHaveNoPeaks(SimAccelerator):
    """memory_summary() shows what is allocated as its peak."""

    def memory_summary(self, device: DeviceLike = None, abbreviated: bool = False) -> str:
        allocated = f"{self.memory_allocated(device) / 2**20:,.1f} MiB"
        return f"allocated {allocated}\nallocated, peak {allocated}"


class CollectingResetsPeaks(SimAccelerator):
    """ipc_collect() resets the peaks."""

    def ipc_collect(self) -> None:
        self.reset_peak_memory_stats()


# -- pinning ---------------------------------------------------------------------------------------


class UnpinsAtOnce(SimAccelerator):
    """unpin_memory() unlocks memory that is still held."""

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            torch.ops.sim.unregister_pinned(tensor.untyped_storage().data_ptr())


class PinsNothingInInference(SimAccelerator):
    """pin_memory() within inference_mode() gives ordinary memory."""

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool | int = True, match_shape: bool = True,
        *, align_bytes: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if torch.is_inference_mode_enabled():
            return tensor.clone()
        return super().pin_memory(tensor, make_copy, match_shape, align_bytes=align_bytes)


class RegistersWholePages(SimAccelerator):
    """register_host_memory() leaves out the rest of the last page."""

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        torch.ops.sim.register_pinned(address, num_bytes // 4096 * 4096)
        return True

    def unregister_host_memory(self, address: int) -> None:
        torch.ops.sim.unregister_pinned(address)


# -- dtypes ----------------------------------------------------------------------------------------


class DeniesBfloat16(SimAccelerator):
    """The device says that it has no bfloat16, and computes in it."""

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        return False


class TuplesAreSizes(SimAccelerator):
    """FloatTensor((1, 2)) takes the numbers for sizes."""

    def _tensor_type(self, name: str, dtype: torch.dtype) -> Any:
        return _OfTuples(dtype, self.device_type)


class _OfTuples(TensorType):
    def __call__(self, *data: Any) -> torch.Tensor:
        return super().__call__(*(data[0] if data and type(data[0]) is tuple else data))


class PickledScalersBeginAnew(_Patched):
    """A gradient scaler that is pickled or copied has its first scale again."""

    def patch(self) -> None:
        def make(theirs: Any) -> Any:
            return lambda scaler, protocol: (_begun_anew, (scaler._type,))

        self.put(mixed_precision._GradScaler, "__reduce_ex__", make)


def _begun_anew(kind: str) -> Any:
    return mixed_precision._grad_scaler(kind)()


class LargeCopiesShareMemory(_WithKernels):
    """A copy of more than 1 MiB to the host shares the device's memory."""

    @staticmethod
    def _copied(
        x: torch.Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
        non_blocking: bool = False, memory_format: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        place, kind = torch.device(device or x.device), dtype or x.dtype
        is_plain = kind == x.dtype and not pin_memory and memory_format in (None, torch.preserve_format)
        if place.type == "cpu" and x.device.type != "cpu" and is_plain and x.nbytes > 1 << 20:
            shared: torch.Tensor = torch.ops.sim.host_view(x)
            return shared
        made = torch.empty_like(
            x, dtype=kind, device=place, pin_memory=bool(pin_memory),
            memory_format=memory_format or torch.preserve_format,
        )  # fmt: skip
        return made.copy_(x, non_blocking)

    kernels = {"_to_copy": _copied}


# -- runtime and ops -------------------------------------------------------------------------------


class LazyCallsWait(SimAccelerator):
    """lazy_call() waits for the next init(), though the context exists."""

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        self.__dict__.setdefault("_waiting", []).append(callback)

    def init(self) -> None:
        super().init()
        for callback in self.__dict__.pop("_waiting", []):
            callback()


class SentTensorsLoseTheirSteps(SimAccelerator):
    """A tensor that is sent to another process arrives contiguous."""

    def __init__(self) -> None:
        super().__init__()

        def reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
            on_host = tensor.detach().cpu().contiguous()
            return sharing._rebuild, (on_host, tensor.device, type(tensor), tensor.requires_grad)

        self._registered = ForkingPickler._extra_reducers[torch.Tensor]  # type: ignore[attr-defined]
        ForkingPickler.register(
            torch.Tensor, lambda t: reduce(t) if t.device.type == "sim" else self._registered(t)
        )

    def uninstall(self) -> None:
        """Puts the device's own function back."""
        ForkingPickler.register(torch.Tensor, self._registered)


class NearestBuilderIsNotTold(SimAccelerator):
    """create_op_builder() of an unknown name logs nothing."""

    def create_op_builder(self, class_name: str) -> Any | None:
        return super().create_op_builder(class_name) if class_name in self.op_builders else None


class LionIsAdagrad(SimAccelerator):
    """CPULionBuilder is Adagrad's builder."""

    op_builders = {
        **SimAccelerator.op_builders,
        "CPULionBuilder": SimAccelerator.op_builders["CPUAdagradBuilder"],
    }


# -- communication: in the processes that checks start ---------------------------------------------


class _InTheChild(SimAccelerator):
    """Replaces a function of torch.distributed in the processes that the checks start."""

    replaced: tuple[str, Callable[[Any], Any]]

    def communication_backend_name(self) -> str:
        name, make = self.replaced
        theirs = getattr(distributed, name)
        if not getattr(theirs, "is_faulty", False):
            made = make(theirs)
            made.is_faulty = True
            setattr(distributed, name, made)
        return super().communication_backend_name()


def _from_the_start(send: Any) -> Any:
    def sent(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if tensor.storage_offset() and tensor.is_contiguous():
            tensor = tensor.as_strided(tensor.shape, tensor.stride(), 0)
        return send(tensor, *args, **options)

    return sent


def _of_32_bits(gather: Any) -> Any:
    @functools.wraps(gather)
    def gathered(into: torch.Tensor, given: torch.Tensor, *args: Any, **options: Any) -> Any:
        if given.dtype == torch.float64 and given.numel():
            given = given.float().double()
        return gather(into, given, *args, **options)

    return gathered


class PartsAreSentFromTheStart(_InTheChild):
    """send() of a part of a tensor sends the start of its memory."""

    replaced = "send", _from_the_start


class GathersOf64BitsHave32(_InTheChild):
    """all_gather_into_tensor moves float64 as float32."""

    replaced = "all_gather_into_tensor", _of_32_bits


CAUGHT_BY: dict[str, dict[type[Accelerator], str]] = {
    "": {
        IntegersAreKeptAsTheyAre: "graphs/shapes_of_the_capture_stay",
        SmallerResultsAreTaken: "graphs/other_shapes_are_refused",
        LongResultsStayHalf: "graphs/replays_of_any_length",
        NearnessIsNoRead: "graphs/every_kind_of_read_is_refused",
        OperatorsOfProgramsAreLeftOut: "graphs/every_kind_of_input_is_read_again",
        CapturesExcludeOtherThreads: "graphs/capture_is_one_threads",
        DeepBlocksForget: "devices/device_context",
        PositionsAreNoDevices: "streams/streams_with_options_by_device",
        StreamsEndEverywhere: "streams/current_stream_of_a_thread",
        LastStateIsForTheRest: "random/states_are_copies",
        RowsOfNormalNumbersAreOne: "random/draws_are_independent",
        HostsErrorsAreUnknown: "memory/out_of_memory",
        SummariesHaveNoPeaks: "memory/summary",
        CollectingResetsPeaks: "memory/walks_over_memory",
        UnpinsAtOnce: "pinning/any_tensor_is_pinned",
        PinsNothingInInference: "pinning/told_truly",
        RegistersWholePages: "pinning/registration",
        DeniesBfloat16: "dtypes/left_out_dtypes",
        TuplesAreSizes: "dtypes/tensor_classes_are_exact",
        PickledScalersBeginAnew: "dtypes/scaler_does_what_torchs_does",
        LargeCopiesShareMemory: "dtypes/copies_share_or_not",
        LazyCallsWait: "runtime/lazy_calls",
        SentTensorsLoseTheirSteps: "runtime/tensors_are_saved",
        NearestBuilderIsNotTold: "ops/builders_found",
        LionIsAdagrad: "ops/builders_found",
        PartsAreSentFromTheStart: "communication/collectives_in_any_order",
        GathersOf64BitsHave32: "communication/collectives_in_any_order",
    },
}
"""By profile of the device: each fault, and the check that has to find it."""
