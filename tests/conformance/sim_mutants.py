"""Faults planted in the emulated accelerator, for what a host with one memory and no streams cannot show."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from acclimate.accelerator import Accelerator, DeviceLike
from acclimate_sim.accelerator import SimAccelerator
from acclimate_sim.profile import VISIBLE_DEVICES


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


class SharedRandomState(SimAccelerator):
    """Every device's random state is that of the first."""

    def get_rng_state(self, device_index: DeviceLike = None) -> torch.Tensor:
        return super().get_rng_state(0)


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

    # The class alone, which has no record here, does not know the variable.
    visible_devices_variable = VISIBLE_DEVICES

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


class ClaimsFloat64(SimAccelerator):
    """supported_dtypes has float64, which the device refuses."""

    def is_fp64_supported(self) -> bool:
        return True


CAUGHT_BY: dict[str, dict[type[Accelerator], str]] = {
    "": {
        SetDeviceForgotten: "devices/set_device",
        DeviceContextForgotten: "devices/device_context",
        DeviceContextStays: "devices/device_context",
        TakesAbsentDevices: "devices/absent_devices",
        SharedRandomState: "random/state_saved_and_restored",
        SeedsEveryDevice: "random/devices_draw_independently",
        CountsDevicesTogether: "memory/devices_are_counted_apart",
        OtherOutOfMemory: "memory/out_of_memory",
        PinsNothing: "pinning/told_truly",
        ReplaysNothing: "graphs/replay_trains",
        LimitIgnored: "launching/visible_devices",
        LimitForgotten: "launching/visible_devices",
    },
    "sync=check": {
        SynchronizeForgotten: "devices/synchronize",
        ClaimsToBeSynchronous: "devices/synchronous_claim",
        ClaimsToResolveDependencies: "streams/dependencies_resolved_by_the_device",
        StreamsDoNotWait: "streams/events_order_streams",
        StreamsIgnoreStreams: "streams/streams_wait_for_streams",
    },
    "mps-like": {ClaimsFloat64: "dtypes/products"},
}
"""By profile of the device: each fault, and the check that has to find it."""
