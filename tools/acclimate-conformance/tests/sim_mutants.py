"""Faults planted in the emulated accelerator, for what a host with one memory and no streams cannot show."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.utils.data._utils.pin_memory as pinning
from torch import distributed

from acclimate.accelerator import Accelerator, DeviceLike
from acclimate.accelerator.recorded_graph import RecordedGraph
from acclimate_sim import safetensors_names, sharing
from acclimate_sim.accelerator import SimAccelerator
from acclimate_sim.record import BACKEND


class LoaderPinsNothing(SimAccelerator):
    """torch's DataLoader leaves its batches in ordinary memory."""

    def __init__(self) -> None:
        super().__init__()
        self._pin = pinning.pin_memory
        pinning.pin_memory = lambda data, device=None: data

    def uninstall(self) -> None:
        """Puts torch's own function back."""
        pinning.pin_memory = self._pin


class OneDeviceForOthers(SimAccelerator):
    """DLPack is told device 0 for every tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._told = told = torch.Tensor.__dlpack_device__
        torch.Tensor.__dlpack_device__ = lambda tensor: (told(tensor)[0], 0)  # type: ignore[method-assign]

    def uninstall(self) -> None:
        """Puts torch's own method back."""
        torch.Tensor.__dlpack_device__ = self._told  # type: ignore[method-assign]


class SetDeviceForgotten(SimAccelerator):
    """set_device does nothing."""

    def set_device(self, device_index: DeviceLike) -> None:
        pass


class DeviceContextForgotten(SimAccelerator):
    """Within device(i) the current device is the one from before."""

    def device(self, device_index: DeviceLike = None) -> AbstractContextManager[Any]:
        self._index(device_index)
        return nullcontext()


class DeviceContextStays(SimAccelerator):
    """After device(i) that device stays the current one."""

    def device(self, device_index: DeviceLike = None) -> AbstractContextManager[Any]:
        if device_index is not None:
            self.set_device(device_index)
        return nullcontext()


class TakesAbsentDevices(SimAccelerator):
    """A device that does not exist counts as the first."""

    def _index(self, device: DeviceLike = None) -> int:
        try:
            return super()._index(device)
        except RuntimeError:
            return 0


class AbsentObjectsAreDriverErrors(SimAccelerator):
    """An absent device that is a torch.device is an error of the driver."""

    def _index(self, device: DeviceLike = None) -> int:
        if isinstance(device, torch.device) and (device.index or 0) >= self.device_count():
            raise RuntimeError("invalid device ordinal")
        return super()._index(device)


class SharedRandomState(SimAccelerator):
    """Every device's random state is that of the first."""

    def get_rng_state(self, device_index: DeviceLike = None) -> torch.Tensor:
        return super().get_rng_state(0)


class VisibleDevicesSorted(SimAccelerator):
    """set_visible_devices_envs sorts the devices."""

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Iterable[int | str]
    ) -> None:
        super().set_visible_devices_envs(current_env, sorted(local_accelerator_ids, key=int))


class SeedsEveryDevice(SimAccelerator):
    """manual_seed seeds all devices."""

    def manual_seed(self, seed: int) -> None:
        super().manual_seed_all(seed)


class CountsDevicesTogether(SimAccelerator):
    """memory_allocated is that of all devices together."""

    def memory_allocated(self, device_index: DeviceLike = None) -> int:
        return sum(super(CountsDevicesTogether, self).memory_allocated(i) for i in range(self.device_count()))


class OtherOutOfMemory(SimAccelerator):
    """OutOfMemoryError is a type that the device never raises."""

    class OutOfMemoryError(RuntimeError):
        pass


class PinsNothing(SimAccelerator):
    """pin_memory gives an ordinary tensor, though the device can lock memory."""

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        return tensor.clone()


class PinnedForEver(SimAccelerator):
    """is_pinned is True for memory of a size that was pinned once, as if it lay in the same place."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: set[int] = set()

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        self._sizes.add(tensor.nbytes)
        return super().pin_memory(tensor, make_copy, match_shape)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return super().is_pinned(tensor) or tensor.nbytes in self._sizes


class PinnedInItsThread(SimAccelerator):
    """is_pinned is false in other threads than the one that pinned the memory."""

    def __init__(self) -> None:
        super().__init__()
        self._pinned_by: dict[int, int] = {}

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        pinned = super().pin_memory(tensor, make_copy, match_shape)
        self._pinned_by[pinned.untyped_storage().data_ptr()] = threading.get_ident()
        return pinned

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        here = threading.get_ident()
        return super().is_pinned(tensor) and (
            self._pinned_by.get(tensor.untyped_storage().data_ptr(), here) == here
        )


class StorageLosesItsBytes(SimAccelerator):
    """A storage that is resized loses what it held."""

    def __init__(self) -> None:
        super().__init__()

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            super(torch.UntypedStorage, storage).resize_(size)
            if storage.device.type == "sim":
                storage.fill_(0)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]

    def uninstall(self) -> None:
        """Puts torch's own method back."""
        del torch.UntypedStorage.resize_


class RefusalsAreCountedForEver(SimAccelerator):
    """reset_accumulated_memory_stats leaves the number of refused allocations as it was."""

    _refusals = 0

    def reset_accumulated_memory_stats(self, device_index: DeviceLike = None) -> None:
        self._refusals = self.memory_stats(device_index)["num_ooms"]
        super().reset_accumulated_memory_stats(device_index)

    def memory_stats(self, device_index: DeviceLike = None) -> dict[str, Any]:
        stats = super().memory_stats(device_index)
        return {**stats, "num_ooms": stats["num_ooms"] + self._refusals}


class TotalIsWhatIsFree(SimAccelerator):
    """The total memory of get_device_properties is what is free."""

    def get_device_properties(self, device_index: DeviceLike = None) -> Any:
        found = super().get_device_properties(device_index)
        return replace(found, total_memory=self.mem_get_info(device_index)[0])


class PeerCopiesInFloat32(SimAccelerator):
    """Copies from device to device have the digits of float32."""

    def __init__(self) -> None:
        super().__init__()
        self._library = torch.library.Library("aten", "IMPL")
        plain = torch.library.get_kernel("aten::_copy_from", "PrivateUse1")

        def copy(keys: Any, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
            between = source.device.type == target.device.type and source.device != target.device
            if source.dtype == torch.float64 and between:
                source = source.float()
            return plain.call_boxed(keys, source, target, non_blocking)

        self._library.impl("_copy_from", copy, "PrivateUse1", with_keyset=True, allow_override=True)

    def uninstall(self) -> None:
        """Puts the device's own operator back."""
        self._library._destroy()


class EmptiesTheCurrentDevice(SimAccelerator):
    """empty_cache() keeps the unused memory of devices that are not current."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, int] = {}

    def empty_cache(self) -> None:
        held = {index: self.memory_reserved(index) for index in range(self.device_count())}
        super().empty_cache()
        self._kept = {index: size for index, size in held.items() if index != self.current_device()}

    def memory_reserved(self, device_index: DeviceLike = None) -> int:
        kept = self._kept.get(self._index(device_index), 0)
        return max(kept, super().memory_reserved(device_index))


class ReplaysNothing(SimAccelerator):
    """replay_graph does nothing."""

    def replay_graph(self, graph: Any) -> None:
        pass


class LimitIgnored(SimAccelerator):
    """The variable that should limit the visible devices is one that the device does not read."""

    def visible_devices_envs(self) -> list[str]:
        return ["NOBODY_READS_THIS"]

    visible_devices_variable = "NOBODY_READS_THIS"


class LimitForgotten(SimAccelerator):
    """set_visible_devices_envs does nothing."""

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Iterable[int | str]
    ) -> None:
        pass


class SynchronizeForgotten(SimAccelerator):
    """synchronize does nothing."""

    def synchronize(self, device_index: DeviceLike = None) -> None:
        self._index(device_index)


class ClaimsToBeSynchronous(SimAccelerator):
    """It says that its work is done when a call returns."""

    def is_synchronized_device(self) -> bool:
        return True


class ClaimsToResolveDependencies(SimAccelerator):
    """It says that streams need not wait for each other."""

    def resolves_data_dependency(self) -> bool:
        return True


class _Impatient(torch.Stream):
    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


class StreamsDoNotWait(SimAccelerator):
    """A stream's wait for an event does nothing."""

    Stream = _Impatient


class StreamsIgnoreStreams(SimAccelerator):
    """A stream's wait for another stream does nothing."""

    Stream = _Impatient


class _OnlyHere(torch.Stream):
    def wait_event(self, event: Any) -> None:
        if event.device == self.device:
            super().wait_event(event)

    def wait_stream(self, stream: Any) -> None:
        if stream.device == self.device:
            super().wait_stream(stream)


class StreamsOfOtherDevicesDoNotWait(SimAccelerator):
    """A stream waits for its own device only."""

    Stream = _OnlyHere


class _OfAPool(torch.Stream):
    _made = itertools.count(1)

    def __new__(cls, *arguments: Any, **options: Any) -> _OfAPool:
        if next(cls._made) % 8:
            return super().__new__(cls, *arguments, **options)
        made = super().__new__(cls, *arguments, **options)
        return super().__new__(cls, stream_id=0, device_index=made.device_index, device_type=made.device_type)


class EveryEighthStreamIsTheDefault(SimAccelerator):
    """Streams come from a pool that has the default stream too."""

    Stream = _OfAPool


class _FirstTime(torch.Event):
    _recorded = False

    def record(self, stream: Any = None) -> None:
        if not self._recorded:
            super().record(stream)
        self._recorded = True


class EventsAreRecordedOnce(SimAccelerator):
    """Recording an event again does nothing."""

    Event = _FirstTime


class _TimedAtHome(torch.Event):
    is_timed = False

    def __new__(cls, *arguments: Any, enable_timing: bool = False, **options: Any) -> _TimedAtHome:
        made = super().__new__(cls, *arguments, enable_timing=enable_timing, **options)
        made.is_timed = enable_timing
        return made

    def record(self, stream: Any = None) -> None:
        home = torch.Stream(
            stream_id=0, device_index=torch.accelerator.current_device_index(), device_type=20
        )
        super().record(home if self.is_timed and stream is None else stream)


class TimedEventsAreOfTheDefaultStream(SimAccelerator):
    """An event with enable_timing is recorded on the default stream, whichever is current."""

    Event = _TimedAtHome


class _ClockOfDevice0(torch.Event):
    """Its clock is the host's: torch takes no end of a class of the program's for its own."""

    _time_ms = 0.0

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        self._time_ms = time.perf_counter() * 1000 if self.device.index == 0 else 0.0

    def elapsed_time(self, end_event: _ClockOfDevice0) -> float:
        return end_event._time_ms - self._time_ms


class OtherDevicesHaveNoClock(SimAccelerator):
    """Events of all devices but the first are 0 ms apart."""

    Event = _ClockOfDevice0


class ClaimsFloat64(SimAccelerator):
    """supported_dtypes has float64, which the device refuses."""

    def is_fp64_supported(self) -> bool:
        return True


class OneDeviceTooFew(SimAccelerator):
    """device_count is one less than there are."""

    def device_count(self) -> int:
        return super().device_count() - 1


class NamesWithoutIndex(SimAccelerator):
    """device_name gives the type alone for every device."""

    def device_name(self, device_index: int | None = None) -> str:
        return self.device_type


class OneCurrentDeviceForAllThreads(SimAccelerator):
    """current_device is what any thread has set."""

    _set = 0

    def set_device(self, device_index: DeviceLike) -> None:
        super().set_device(device_index)
        self._set = super().current_device()

    def current_device(self) -> int:
        return self._set


class DeviceContextStaysAfterAnError(SimAccelerator):
    """After an error within device(i) that device stays the current one."""

    @contextmanager
    def device(self, device_index: DeviceLike = None) -> Iterator[None]:
        before = self.current_device()
        if device_index is not None:
            self.set_device(device_index)
        yield
        self.set_device(before)


class PropertiesByTheNumber(SimAccelerator):
    """get_device_properties looks at the number in a name only."""

    def get_device_properties(self, device: DeviceLike = None) -> Any:
        if isinstance(device, (str, torch.device)) and ":" in str(device):
            device = int(str(device).rpartition(":")[2])
        return super().get_device_properties(device)


class RecordOfTheLargestMachine(SimAccelerator):
    """The device_count of its record is 8 on every machine."""

    _record = replace(BACKEND, device_count=lambda: 8)


class CountsFromTheEnd(SimAccelerator):
    """-1 is the last device."""

    def _index(self, device: DeviceLike = None) -> int:
        return super()._index(
            device + self.device_count() if isinstance(device, int) and device < 0 else device
        )


class SynchronizeMoves(SimAccelerator):
    """synchronize(i) makes that device the current one."""

    def synchronize(self, device_index: DeviceLike = None) -> None:
        if device_index is not None:
            self.set_device(device_index)
        super().synchronize()


class HostTimersWithoutWaiting(SimAccelerator):
    """It is not synchronous, and says that the host's clock measures its work."""

    def use_host_timers(self) -> bool:
        return True


class SeedsTheHostToo(SimAccelerator):
    """manual_seed seeds the host's generator as well."""

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        super().manual_seed(seed)


class KeywordsAreTheCurrentDevice(SimAccelerator):
    """default_stream(device_index=…) is that of the current device."""

    def default_stream(self, *given: Any, device_index: Any = None) -> Any:
        return super().default_stream(*given)


class InitialSeedOfTheFirst(SimAccelerator):
    """initial_seed is that of the first device."""

    def initial_seed(self) -> int:
        return self.default_generator(0).initial_seed()


class StatesOfTheFirst(SimAccelerator):
    """get_rng_state_all has the state of the first device for each."""

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state(0) for _ in range(self.device_count())]


class StreamOfTheCurrentDevice(SimAccelerator):
    """current_stream is that of the current device, whichever is named."""

    def current_stream(self, device_index: DeviceLike = None) -> Any:
        self._index(device_index)
        return super().current_stream()


class PeaksOfTheFirst(SimAccelerator):
    """max_memory_reserved is that of the first device."""

    def max_memory_reserved(self, device_index: DeviceLike = None) -> int:
        self._index(device_index)
        return super().max_memory_reserved(0)


class ResetsTheCurrent(SimAccelerator):
    """reset_peak_memory_stats resets the current device, whichever is named."""

    def reset_peak_memory_stats(self, device_index: DeviceLike = None) -> None:
        self._index(device_index)
        super().reset_peak_memory_stats()


class FreeMemoryOfTheFirst(SimAccelerator):
    """available_memory is that of the first device."""

    def available_memory(self, device_index: DeviceLike = None) -> int:
        self._index(device_index)
        return super().available_memory(0)


class CacheKept(SimAccelerator):
    """empty_cache does nothing."""

    def empty_cache(self) -> None:
        pass


class StatisticsLost(SimAccelerator):
    """It keeps no figures, and torch has them."""

    def memory_stats(self, device_index: DeviceLike = None) -> dict[str, Any]:
        self._index(device_index)
        return {}

    def memory_allocated(self, device_index: DeviceLike = None) -> int:
        self._index(device_index)
        return 0


class OnTheFirstOnly(SimAccelerator):
    """on_accelerator is true of the first device's tensors alone."""

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device == torch.device(self.device_type, 0)


class PinsNoStridedTensors(SimAccelerator):
    """pin_memory gives strided tensors back as they are."""

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        if make_copy and not tensor.is_contiguous():
            return tensor
        return super().pin_memory(tensor, make_copy, match_shape)


class PinnedByTheirStart(SimAccelerator):
    """is_pinned is false of a view that begins later than its memory."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return super().is_pinned(tensor) and tensor.storage_offset() == 0


class CaptureStreamStays(SimAccelerator):
    """After a capture on a stream that stream stays the current one."""

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        self.set_stream(stream)
        return super().capture_to_graph(graph)


class MarksNothing(SimAccelerator):
    """range_push and range_pop do nothing."""

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        pass

    def range_pop(self, domain: str | None = None) -> None:
        pass


class OtherDevicesVisible(SimAccelerator):
    """set_visible_devices_envs makes the first devices visible, as many as were named."""

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Iterable[int | str]
    ) -> None:
        super().set_visible_devices_envs(current_env, range(len(list(local_accelerator_ids))))


class RefusedDeviceMoves(SimAccelerator):
    """A refused set_device makes device 0 the current one."""

    def set_device(self, device_index: DeviceLike) -> None:
        try:
            super().set_device(device_index)
        except RuntimeError:
            super().set_device(0)
            raise


class SeedsFromTheCurrentOn(SimAccelerator):
    """seed_all leaves out the devices before the current one."""

    def seed_all(self) -> int:
        kept = [super(SeedsFromTheCurrentOn, self).get_rng_state(i) for i in range(self.current_device())]
        seed = super().seed_all()
        for index, state in enumerate(kept):
            self.set_rng_state(state, index)
        return seed


class TypeIsDeviceZero(SimAccelerator):
    """max_memory_allocated of the device's type alone is that of device 0."""

    def max_memory_allocated(self, device_index: DeviceLike = None) -> int:
        return super().max_memory_allocated(0 if device_index == self.device_type else device_index)


class TotalOfANameIsAFloat(SimAccelerator):
    """total_memory of a device that is named is a float."""

    def total_memory(self, device_index: DeviceLike = None) -> Any:
        total = super().total_memory(device_index)
        return float(total) if isinstance(device_index, str) else total


class ReservedOf32Bits(SimAccelerator):
    """memory_reserved wraps at 2 GiB, as a signed number does: there may be room for no more than that."""

    def memory_reserved(self, device_index: DeviceLike = None) -> int:
        return super().memory_reserved(device_index) & 0x7FFFFFFF


class CacheIsAvailable(SimAccelerator):
    """available_memory counts what the allocator keeps."""

    def available_memory(self, device_index: DeviceLike = None) -> int:
        return self.total_memory(device_index) - self.memory_allocated(device_index)


class StreamBlockMoves(SimAccelerator):
    """After stream(s), of another device, that device is current."""

    @contextmanager
    def stream(self, stream: Any | None) -> Iterator[Any]:
        with super().stream(stream):
            yield stream
        if stream is not None:
            self.set_device(stream.device.index)


class StreamBlockKeepsTheDevice(SimAccelerator):
    """Within stream(s), of another device, the device stays the one that was current."""

    @contextmanager
    def stream(self, stream: Any | None) -> Iterator[Any]:
        here = self.current_device()
        with super().stream(stream):
            self.set_device(here)
            yield stream


class _Keeping(RecordedGraph):
    def reset(self) -> None:
        self._kept = self._calls
        super().reset()


class ResetKeepsResults(SimAccelerator):
    """reset() of a graph keeps what the graph held."""

    def create_graph(self) -> Any:
        return _Keeping()


class _OfOneDevice(RecordedGraph):
    def replay(self) -> None:
        here = torch.accelerator.current_device_index()
        self._calls = [
            call for call in self._calls if all(r.tensor.device.index == here for r in call.results)
        ]
        super().replay()


class ReplaysOneDevice(SimAccelerator):
    """A replay leaves out the work on devices that are not current."""

    def create_graph(self) -> Any:
        return _OfOneDevice()


class ConvolutionsKeepMemory(SimAccelerator):
    """Each backward pass of a convolution keeps its workspace."""

    def __init__(self) -> None:
        super().__init__()
        self._forward = forward = torch.nn.Conv2d.forward
        kept: list[torch.Tensor] = []

        def keeping(layer: torch.nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
            result = forward(layer, x)
            result.register_hook(lambda gradient: kept.append(gradient.detach() + 1))
            return result

        torch.nn.Conv2d.forward = keeping  # type: ignore[method-assign]

    def uninstall(self) -> None:
        """Puts torch's own method back."""
        torch.nn.Conv2d.forward = self._forward  # type: ignore[method-assign]


_rebuild = sharing._rebuild


def _rebuild_in_float32(on_host: torch.Tensor, *others: Any) -> torch.Tensor:
    return _rebuild(on_host.float().double() if on_host.dtype == torch.float64 else on_host, *others)


class SendsFloat32(SimAccelerator):
    """A float64 tensor that is sent to another process has the digits of float32."""

    def __init__(self) -> None:
        super().__init__()
        _rebuild_in_float32.__module__, _rebuild_in_float32.__qualname__ = sharing.__name__, "_rebuild"
        sharing._rebuild = _rebuild_in_float32

    def uninstall(self) -> None:
        """Puts the package's own function back."""
        sharing._rebuild = _rebuild


class BarrierOfDevicesReturns(SimAccelerator):
    """A barrier that is told its device returns at once."""

    def communication_backend_name(self) -> str:
        if distributed.barrier.__module__ != __name__:
            theirs = distributed.barrier

            def barrier(*group: Any, device_ids: Any = None, **options: Any) -> Any:
                return None if device_ids else theirs(*group, **options)

            distributed.barrier = barrier
        return super().communication_backend_name()


class _KeptBlock:
    """A block that can be entered again, also within itself and in several threads."""

    def __init__(self, accelerator: Accelerator, index: int) -> None:
        self._accelerator, self._index = accelerator, index
        self._before = threading.local()

    def __enter__(self) -> None:
        if not hasattr(self._before, "devices"):
            self._before.devices = []
        self._before.devices.append(self._accelerator.current_device())
        self._accelerator.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        self._accelerator.set_device(self._before.devices.pop())


class OneBlockForEachDevice(SimAccelerator):
    """device(i) returns the same object each time, and device(None) a block that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks = [_KeptBlock(self, index) for index in range(self.device_count())]

    def device(self, device_index: DeviceLike = None) -> AbstractContextManager[Any]:
        index = self._index(device_index)
        return nullcontext() if device_index is None else self._blocks[index]  # type: ignore[return-value]


class OneBlockThatForgets(OneBlockForEachDevice):
    """device(i) returns the same object each time, which remembers only the last device before it."""

    def __init__(self) -> None:
        super().__init__()
        for block in self._blocks:
            block._before.devices = _OneEntry()


class _OneEntry(list[int]):
    def append(self, device: int) -> None:
        self[:] = [device]

    def pop(self, index: Any = -1) -> int:
        return self[0]


class AllocatedInWholeMiB(SimAccelerator):
    """memory_allocated is rounded down to whole MiB."""

    def memory_allocated(self, device_index: DeviceLike = None) -> int:
        return super().memory_allocated(device_index) >> 20 << 20


class PeakInWholeMiB(SimAccelerator):
    """max_memory_allocated is rounded to whole MiB."""

    def max_memory_allocated(self, device_index: DeviceLike = None) -> int:
        return (super().max_memory_allocated(device_index) + (1 << 19)) >> 20 << 20


class PoolsPeakIsTheTensors(SimAccelerator):
    """max_memory_reserved is max_memory_allocated."""

    def max_memory_reserved(self, device_index: DeviceLike = None) -> int:
        return self.max_memory_allocated(device_index)


class OtherDevicesStreamsForgotten(SimAccelerator):
    """stream(s) does nothing if the device of s is not current."""

    def stream(self, stream: Any | None) -> AbstractContextManager[Any]:
        elsewhere = stream is not None and stream.device.index != self.current_device()
        return nullcontext() if elsewhere else super().stream(stream)


# -- an allocator that reserves large blocks, as some vendors' do ----------------------------------------


class LargeBlocks(SimAccelerator):
    """Its allocator reserves blocks of 256 MiB, from which it takes tensors."""

    block = 256 << 20

    def _in_blocks(self, size: int) -> int:
        return -(-size // self.block) * self.block

    def memory_reserved(self, device_index: DeviceLike = None) -> int:
        return self._in_blocks(super().memory_reserved(device_index))

    def max_memory_reserved(self, device_index: DeviceLike = None) -> int:
        return self._in_blocks(super().max_memory_reserved(device_index))

    def memory_stats(self, device_index: DeviceLike = None) -> dict[str, Any]:
        figures = {
            "reserved_bytes.all.current": self.memory_reserved(device_index),
            "reserved_bytes.all.peak": self.max_memory_reserved(device_index),
        }
        return {**super().memory_stats(device_index), **figures}

    def _memory_info(self, index: int) -> tuple[int, int]:
        total = super()._memory_info(index)[1]
        return max(0, total - self.memory_reserved(index)), total


class LargerBlocks(LargeBlocks):
    """The blocks have 2 GiB, more than a check allocates."""

    block = 2 << 30


class OneBlockIsKept(LargeBlocks):
    """empty_cache() keeps one block that is empty."""

    def __init__(self) -> None:
        super().__init__()
        self._kept = dict.fromkeys(range(self.device_count()), 0)

    def memory_reserved(self, device_index: DeviceLike = None) -> int:
        index = self._index(device_index)
        self._kept[index] = max(self._kept[index], super().memory_reserved(index))
        return self._kept[index]

    def max_memory_reserved(self, device_index: DeviceLike = None) -> int:
        return max(self.memory_reserved(device_index), super().max_memory_reserved(device_index))

    def empty_cache(self) -> None:
        held = {index: self.memory_reserved(index) for index in self._kept}
        super().empty_cache()
        for index, before in held.items():
            self._kept[index] = min(before, LargeBlocks.memory_reserved(self, index) + self.block)


class LargeBlocksKept(LargeBlocks):
    """Its blocks have 256 MiB, and empty_cache does nothing."""

    def empty_cache(self) -> None:
        pass


class BlockForEachTensor(LargeBlocks):
    """memory_reserved grows by 256 MiB for each tensor, though two fit into a block."""

    def _in_blocks(self, size: int) -> int:
        return -(-size // (96 << 20)) * self.block


class LargeBlocksPeakIsNow(LargeBlocks):
    """Its blocks have 256 MiB, and max_memory_allocated is memory_allocated."""

    def max_memory_allocated(self, device_index: DeviceLike = None) -> int:
        return self.memory_allocated(device_index)


class ReservedTwice(SimAccelerator):
    """memory_reserved is twice as much as the allocator holds."""

    def memory_reserved(self, device_index: DeviceLike = None) -> int:
        return 2 * super().memory_reserved(device_index)


class NamedDeviceLosesItsStream(SimAccelerator):
    """set_device of a name makes the default stream of that device current."""

    def set_device(self, device_index: DeviceLike) -> None:
        super().set_device(device_index)
        if isinstance(device_index, str):
            self.set_stream(self.default_stream(device_index))


class RestoresTheCurrentDevice(SimAccelerator):
    """set_rng_state with a torch.device restores the current device."""

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceLike = None) -> None:
        super().set_rng_state(new_state, None if isinstance(device_index, torch.device) else device_index)


class NegativeSeedsLoseTheirSign(SimAccelerator):
    """manual_seed_all takes the absolute value of a seed."""

    def manual_seed_all(self, seed: int) -> None:
        super().manual_seed_all(abs(seed))


class CountsTheFirstDeviceToo(SimAccelerator):
    """memory_allocated of a device that holds something counts what is on the first one too."""

    def memory_allocated(self, device_index: DeviceLike = None) -> int:
        index = self._index(device_index)
        own = super().memory_allocated(index)
        return own + super().memory_allocated(0) if index and own else own


class NumberOfBytesIsNoCopy(SimAccelerator):
    """pin_memory with an alignment of 0 copies nothing, since 0 equals False."""

    def pin_memory(
        self,
        tensor: torch.Tensor,
        make_copy: bool | int = True,
        match_shape: bool = True,
        *,
        align_bytes: int | None = None,
    ) -> torch.Tensor:
        if not make_copy:
            return super().pin_memory(torch.zeros_like(tensor), True, match_shape)
        return super().pin_memory(tensor, make_copy, match_shape, align_bytes=align_bytes)


class EmptyCacheResetsPeaks(SimAccelerator):
    """empty_cache resets the peaks of all devices."""

    def empty_cache(self) -> None:
        super().empty_cache()
        for index in range(self.device_count()):
            self.reset_peak_memory_stats(index)


class CountingDraws(SimAccelerator):
    """device_count() draws a random number of the host."""

    def device_count(self) -> int:
        count = super().device_count()
        torch.rand(1)
        return count


class ResetByPlaceOnly(SimAccelerator):
    """reset_peak_memory_stats resets the current device if a device is given by name."""

    def reset_peak_memory_stats(self, *place: DeviceLike, device_index: DeviceLike = None) -> None:
        super().reset_peak_memory_stats(*place)


class EverySeventhNameIsEmpty(SimAccelerator):
    """Each 7th result of communication_backend_name() is empty."""

    _calls = itertools.count(1)

    def communication_backend_name(self) -> str:
        return super().communication_backend_name() if next(self._calls) % 7 else ""


class ToolkitDetectsAnomalies(SimAccelerator):
    """toolkit_version() turns the detection of anomalies on."""

    def toolkit_version(self) -> str | None:
        torch.autograd.set_detect_anomaly(True)
        return super().toolkit_version()


class TruthsKeepMemory(SimAccelerator):
    """Each call of is_triton_supported() keeps memory of the device."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[torch.Tensor] = []

    def is_triton_supported(self) -> bool:
        self._kept.append(torch.ones(64, device=self.device_type))
        return super().is_triton_supported()


class CachedIsOneMore(SimAccelerator):
    """max_memory_cached is one byte more than max_memory_reserved."""

    def max_memory_cached(self, device_index: DeviceLike = None) -> int:
        return super().max_memory_cached(device_index) + 1


class RestoresOnlyItsOwnDevice(SimAccelerator):
    """device(i) restores the device from before only if device i is still current at its end."""

    @contextmanager
    def device(self, device_index: DeviceLike = None) -> Iterator[None]:
        before, own = self.current_device(), self._index(device_index)
        self.set_device(own)
        try:
            yield
        finally:
            if self.current_device() == own:
                self.set_device(before)


class DeviceContextHidesErrorsOfTorch(SimAccelerator):
    """An error of the type RuntimeError ends in device(i)."""

    @contextmanager
    def device(self, device_index: DeviceLike = None) -> Iterator[None]:
        with suppress(RuntimeError), super().device(device_index):
            yield


class CountsWhatIsVisibleNow(SimAccelerator):
    """device_count() follows the variable of visible devices when it changes later."""

    def device_count(self) -> int:
        visible = os.environ.get("ACCLIMATE_SIM_VISIBLE_DEVICES")
        return super().device_count() if visible is None else len(visible.split(","))


class ConversionsIntoGapsFillThem(SimAccelerator):
    """A copy to another dtype, into every second or third element, writes in a row."""

    def __init__(self) -> None:
        super().__init__()
        self._library = torch.library.Library("aten", "IMPL")
        plain = torch.library.get_kernel("aten::_copy_from", "PrivateUse1")

        def copy(keys: Any, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
            into = target
            has_gaps = target.numel() > 1 and target.stride(-1) > 1 and target.device.type == "sim"
            if source.dtype != target.dtype and source.is_contiguous() and has_gaps:
                packed = torch.empty(target.shape, device="meta").stride()
                into = target.as_strided(target.shape, packed)
            plain.call_boxed(keys, source, into, non_blocking)
            return target

        self._library.impl("_copy_from", copy, "PrivateUse1", with_keyset=True, allow_override=True)

    def uninstall(self) -> None:
        """Puts the device's own operator back."""
        self._library._destroy()


class LongTailsAreNotSaved(SimAccelerator):
    """What is saved of more than 1 MiB lacks the bytes after the last whole 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self._cpu = plain = torch.UntypedStorage.cpu

        def cpu(storage: torch.UntypedStorage) -> Any:
            host = plain(storage)
            size = host.nbytes()
            if storage.device.type == "sim" and size > 1 << 20:
                torch.empty(0, dtype=torch.uint8).set_(host)[size // 65536 * 65536 :].zero_()
            return host

        torch.UntypedStorage.cpu = cpu

    def uninstall(self) -> None:
        """Puts torch's method back."""
        torch.UntypedStorage.cpu = self._cpu


class SafetensorsOnTheCurrentDevice(SimAccelerator):
    """A loader of safetensors puts tensors on the current device, whichever is named."""

    def __init__(self) -> None:
        super().__init__()
        self._index_before = plain = safetensors_names._index_of_ours

        def current(device: Any, device_type: str) -> Any:
            ours = torch.device(device).type == device_type
            return self.current_device() if ours else plain(device, device_type)

        safetensors_names._index_of_ours = current

    def uninstall(self) -> None:
        """Puts the loader's function back."""
        safetensors_names._index_of_ours = self._index_before


CAUGHT_BY: dict[str, dict[type[Accelerator], str]] = {
    "": {
        RestoresOnlyItsOwnDevice: "devices/device_context",
        DeviceContextHidesErrorsOfTorch: "devices/device_context",
        CountsWhatIsVisibleNow: "devices/counts",
        ConversionsIntoGapsFillThem: "dtypes/copies_of_every_kind",
        LongTailsAreNotSaved: "runtime/tensors_are_saved",
        SafetensorsOnTheCurrentDevice: "runtime/tensors_are_saved",
        CountingDraws: "runtime/calls_change_nothing_else",
        ResetByPlaceOnly: "runtime/calls_change_nothing_else",
        EverySeventhNameIsEmpty: "runtime/calls_change_nothing_else",
        ToolkitDetectsAnomalies: "runtime/calls_change_nothing_else",
        TruthsKeepMemory: "runtime/calls_change_nothing_else",
        CachedIsOneMore: "memory/small_tensors_show",
        LargeBlocksKept: "memory/reserved_follows_allocations",
        BlockForEachTensor: "memory/reserved_follows_allocations",
        LargeBlocksPeakIsNow: "memory/peak_is_the_highest",
        ReservedTwice: "memory/reserved_follows_allocations",
        LoaderPinsNothing: "pinning/loaded_batches_are_pinned",
        OneDeviceForOthers: "runtime/tensors_in_python",
        SetDeviceForgotten: "devices/set_device",
        DeviceContextForgotten: "devices/device_context",
        DeviceContextStays: "devices/device_context",
        OneBlockThatForgets: "devices/device_context",
        TakesAbsentDevices: "devices/absent_devices",
        AbsentObjectsAreDriverErrors: "devices/absent_devices",
        SharedRandomState: "random/state_saved_and_restored",
        SeedsEveryDevice: "random/devices_draw_independently",
        CountsDevicesTogether: "memory/devices_are_counted_apart",
        OtherOutOfMemory: "memory/out_of_memory",
        PinsNothing: "pinning/told_truly",
        RefusalsAreCountedForEver: "memory/accumulated_statistics",
        TotalIsWhatIsFree: "memory/capacity_agrees",
        PeerCopiesInFloat32: "dtypes/copies_between_devices",
        PinnedInItsThread: "pinning/told_truly",
        EveryEighthStreamIsTheDefault: "streams/current_stream",
        PinnedForEver: "pinning/memory_is_pinned_each_time",
        StorageLosesItsBytes: "runtime/tensors_in_python",
        EmptiesTheCurrentDevice: "memory/devices_are_counted_apart",
        ReplaysNothing: "graphs/replay_trains",
        LimitIgnored: "launching/visible_devices",
        OneDeviceTooFew: "devices/counts",
        NamesWithoutIndex: "devices/names",
        OneCurrentDeviceForAllThreads: "devices/current_device_of_a_thread",
        DeviceContextStaysAfterAnError: "devices/device_context",
        CountsFromTheEnd: "devices/absent_devices",
        PropertiesByTheNumber: "devices/absent_devices",
        RecordOfTheLargestMachine: "devices/counts",
        SynchronizeMoves: "devices/synchronize",
        HostTimersWithoutWaiting: "devices/synchronous_claim",
        SeedsTheHostToo: "random/host_is_left_alone",
        KeywordsAreTheCurrentDevice: "streams/device_arguments",
        InitialSeedOfTheFirst: "random/current_device_is_meant",
        StatesOfTheFirst: "random/states_of_all_devices",
        StreamOfTheCurrentDevice: "streams/streams_by_device",
        PeaksOfTheFirst: "memory/devices_are_counted_apart",
        ResetsTheCurrent: "memory/resets_by_device",
        FreeMemoryOfTheFirst: "memory/what_is_left_by_device",
        CacheKept: "memory/reserved_follows_allocations",
        StatisticsLost: "memory/allocation_shows",
        OnTheFirstOnly: "pinning/places_are_told",
        PinsNoStridedTensors: "pinning/any_tensor_is_pinned",
        PinnedByTheirStart: "pinning/told_truly",
        CaptureStreamStays: "graphs/capture_options",
        MarksNothing: "runtime/profiler_marks",
        RefusedDeviceMoves: "devices/absent_devices",
        SeedsFromTheCurrentOn: "random/fresh_seeds",
        TypeIsDeviceZero: "memory/device_arguments",
        TotalOfANameIsAFloat: "memory/device_arguments",
        ReservedOf32Bits: "memory/figures_beyond_32_bits",
        CacheIsAvailable: "memory/cache_is_not_available",
        StreamBlockMoves: "devices/blocks_end_as_they_began",
        ResetKeepsResults: "graphs/reset_frees_memory",
        ReplaysOneDevice: "graphs/work_on_every_device_is_repeated",
        ConvolutionsKeepMemory: "memory/no_layer_keeps_memory",
        BarrierOfDevicesReturns: "communication/barrier",
        SendsFloat32: "runtime/models_are_saved",
        AllocatedInWholeMiB: "memory/small_tensors_show",
        PeakInWholeMiB: "memory/small_tensors_show",
        PoolsPeakIsTheTensors: "memory/pool_and_tensors_differ",
        StreamBlockKeepsTheDevice: "streams/streams_of_other_devices",
        OtherDevicesStreamsForgotten: "streams/streams_of_other_devices",
        NamedDeviceLosesItsStream: "devices/absent_devices",
        RestoresTheCurrentDevice: "random/device_arguments",
        NegativeSeedsLoseTheirSign: "random/seeds_of_every_size",
        CountsTheFirstDeviceToo: "memory/devices_are_counted_apart",
        NumberOfBytesIsNoCopy: "pinning/any_length_is_pinned",
        EmptyCacheResetsPeaks: "memory/reserved_follows_allocations",
        OtherDevicesHaveNoClock: "streams/events_measure_time",
    },
    "sync=check": {
        SynchronizeForgotten: "devices/synchronize",
        ClaimsToBeSynchronous: "devices/synchronous_claim",
        ClaimsToResolveDependencies: "streams/dependencies_resolved_by_the_device",
        StreamsDoNotWait: "streams/events_order_streams",
        StreamsIgnoreStreams: "streams/streams_wait_for_streams",
        StreamsOfOtherDevicesDoNotWait: "streams/streams_wait_for_other_devices",
        EventsAreRecordedOnce: "streams/events_are_recorded_again",
        TimedEventsAreOfTheDefaultStream: "streams/waits_deliver_copies",
    },
    "mps-like": {ClaimsFloat64: "dtypes/products"},
    "devices=2": {
        LimitForgotten: "launching/visible_devices",
        OtherDevicesVisible: "launching/visible_devices",
        VisibleDevicesSorted: "launching/visible_devices",
    },
}
"""By profile of the device: each fault, and the check that has to find it."""


class TakesHalfAState(SimAccelerator):
    """A state of half the length is taken, as CUDA takes an older form of its states."""

    def set_rng_state(self, new_state: torch.Tensor, device_index: Any = None) -> None:
        whole = self.get_rng_state(device_index)
        is_half = len(new_state) == len(whole) // 2 and new_state.dtype is torch.uint8
        super().set_rng_state(whole if is_half else new_state, device_index)


_OF_BLOCKS = tuple(
    f"memory/{name}"
    for name in ("reserved_follows_allocations", "peak_is_the_highest", "nothing_leaks",
                 "pool_and_tensors_differ", "devices_are_counted_apart", "figures_beyond_32_bits")
)  # fmt: skip
SOUND: dict[type[Accelerator], tuple[str, ...]] = {
    LargeBlocks: _OF_BLOCKS,
    LargerBlocks: _OF_BLOCKS,
    OneBlockIsKept: _OF_BLOCKS,
    OneBlockForEachDevice: ("devices/absent_devices", "devices/device_context"),
    OneBlockThatForgets: ("devices/absent_devices",),
    TakesHalfAState: ("random/what_does_not_fit_is_refused",),
}
"""What is unusual but right, and checks that must not mistake it for a fault."""
