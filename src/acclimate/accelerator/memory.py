"""Memory of a device: allocated, peak and free sizes, all in bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from acclimate.accelerator.devices import DeviceLike, Devices

# The keys of torch's allocator statistics for devices whose module has the statistics but no single figures.
_ALLOCATED = "allocated_bytes.all.current"
_ALLOCATED_PEAK = "allocated_bytes.all.peak"
_RESERVED = "reserved_bytes.all.current"
_RESERVED_PEAK = "reserved_bytes.all.peak"


def is_host_out_of_memory(error: BaseException) -> bool:
    """Whether torch's allocator for the host raised an error, which is a plain ``RuntimeError``."""
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


class Memory(Devices):
    """Statistics of a device's allocator.

    *Allocated* memory is occupied by tensors. *Reserved* memory (formerly *cached*) is held by the allocator,
    whether or not tensors occupy it.
    """

    OutOfMemoryError: ClassVar[type[RuntimeError]] = torch.OutOfMemoryError
    """The error that an allocation raises when a device is out of memory.

    Delegates to: ``torch.OutOfMemoryError``, for every device.
    CPU: the same type, but torch's host allocator raises a plain ``RuntimeError`` ("can't allocate memory"),
        and more often Linux kills the process.
    CUDA: same as ``torch.cuda.OutOfMemoryError``.
    """

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an exception means that the device, or the host, is out of memory.

        ``except acc.OutOfMemoryError`` misses torch's allocator for the host, which raises a plain
        ``RuntimeError``; code that retries with a smaller batch should call this method instead. Programs for
        a device meet that allocator in copies to the host, and in operators that torch computes there.

        Delegates to: :attr:`OutOfMemoryError`, and the message of the error of torch's host allocator.
        CPU: as stated.
        CUDA: as stated.
        """
        return isinstance(error, self.OutOfMemoryError) or is_host_out_of_memory(error)

    def _offered_by_allocator(self, name: str, generic_name: str | None = None) -> Callable[..., Any] | None:
        """Like :meth:`_offered`, but skips ``torch.accelerator`` if the allocator keeps no statistics.

        A device may register its own allocator without statistics (torch_tpu does); the functions of
        ``torch.accelerator`` then fail on an assertion.
        """
        function = getattr(self.torch_module, name, None)
        if function is None and self._is_torch_accelerator():
            try:
                torch.accelerator.memory_stats()
            except RuntimeError:
                return None
            function = self._offered(name, generic_name)
        return function

    def _figure(self, name: str, statistic: str, device_index: DeviceLike) -> int:
        """Returns a figure from torch's function ``name``, else from the statistics, else 0.

        The statistics come before the functions of ``torch.accelerator``, which look into torch's own: these
        are empty for a device whose module keeps its own.
        """
        index = self._index(device_index)
        figure = getattr(self.torch_module, name, None)
        if figure is None:
            statistics = self.memory_stats(index)
            if statistic in statistics:
                return int(statistics[statistic])
            figure = self._offered_by_allocator(name)
        return int(figure(index)) if figure is not None else 0

    def empty_cache(self) -> None:
        """Returns unused memory of the allocator to the device.

        Delegates to: ``torch.<device>.empty_cache``, else ``torch.accelerator.empty_cache``.
        CPU: does nothing, since torch's host allocator has no cache.
        CUDA: ``torch.cuda.empty_cache``.
        """
        release = self._offered_by_allocator("empty_cache")
        if release is not None:
            release()

    def memory_allocated(self, device_index: DeviceLike = None) -> int:
        """Bytes that tensors occupy on a device.

        Delegates to: ``torch.<device>.memory_allocated``, else ``torch.accelerator.memory_allocated``.
        CPU: the resident set of this process.
        CUDA: ``torch.cuda.memory_allocated``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        return self._figure("memory_allocated", _ALLOCATED, device_index)

    def max_memory_allocated(self, device_index: DeviceLike = None) -> int:
        """The peak of :meth:`memory_allocated`, in bytes, since the start or the last reset.

        Delegates to: ``torch.<device>.max_memory_allocated``, else
            ``torch.accelerator.max_memory_allocated``.
        CPU: the kernel's high-water mark of the resident set, which misses no peak between two calls.
        CUDA: ``torch.cuda.max_memory_allocated``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        return self._figure("max_memory_allocated", _ALLOCATED_PEAK, device_index)

    def reset_max_memory_allocated(self, device_index: DeviceLike = None) -> None:
        """Resets the peaks to the present values; the same as :meth:`reset_peak_memory_stats`.

        Delegates to: :meth:`reset_peak_memory_stats`, as torch's function of this name does.
        CPU: resets the kernel's high-water mark.
        CUDA: ``torch.cuda.reset_peak_memory_stats``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        self.reset_peak_memory_stats(device_index)

    def memory_reserved(self, device_index: DeviceLike = None) -> int:
        """Bytes of a device that the allocator holds, whether or not tensors occupy them.

        Delegates to: ``torch.<device>.memory_reserved``, else ``torch.accelerator.memory_reserved``.
        CPU: the resident set of this process.
        CUDA: ``torch.cuda.memory_reserved``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        return self._figure("memory_reserved", _RESERVED, device_index)

    def max_memory_reserved(self, device_index: DeviceLike = None) -> int:
        """The peak of :meth:`memory_reserved`, in bytes, since the start or the last reset.

        Delegates to: ``torch.<device>.max_memory_reserved``, else
            ``torch.accelerator.max_memory_reserved``.
        CPU: the kernel's high-water mark of the resident set.
        CUDA: ``torch.cuda.max_memory_reserved``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        return self._figure("max_memory_reserved", _RESERVED_PEAK, device_index)

    def memory_cached(self, device_index: DeviceLike = None) -> int:
        """The older name of :meth:`memory_reserved`.

        Delegates to: :meth:`memory_reserved`.
        CPU: the resident set of this process.
        CUDA: ``torch.cuda.memory_reserved``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: DeviceLike = None) -> int:
        """The older name of :meth:`max_memory_reserved`.

        Delegates to: :meth:`max_memory_reserved`.
        CPU: the kernel's high-water mark of the resident set.
        CUDA: ``torch.cuda.max_memory_reserved``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        return self.max_memory_reserved(device_index)

    def reset_max_memory_cached(self, device_index: DeviceLike = None) -> None:
        """The older name of :meth:`reset_peak_memory_stats`.

        Delegates to: :meth:`reset_peak_memory_stats`.
        CPU: resets the kernel's high-water mark.
        CUDA: ``torch.cuda.reset_peak_memory_stats``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        self.reset_peak_memory_stats(device_index)

    def reset_peak_memory_stats(self, device_index: DeviceLike = None) -> None:
        """Resets the peaks to the present values.

        Delegates to: ``torch.<device>.reset_peak_memory_stats``, else
            ``torch.accelerator.reset_peak_memory_stats``.
        CPU: resets the kernel's high-water mark through ``/proc/self/clear_refs``.
        CUDA: ``torch.cuda.reset_peak_memory_stats``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        index = self._index(device_index)
        for kind in ("allocated", "reserved"):
            self._peaks_read.pop((index, kind), None)
        reset = self._offered_by_allocator("reset_peak_memory_stats")
        if reset is not None:
            reset(index)

    def reset_accumulated_memory_stats(self, device_index: DeviceLike = None) -> None:
        """Resets the accumulating counters of :meth:`memory_stats` to 0.

        Delegates to: ``torch.<device>.reset_accumulated_memory_stats``, else ``torch.accelerator``'s.
        CPU: does nothing, since the host's allocator has no such counters.
        CUDA: ``torch.cuda.reset_accumulated_memory_stats``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        index = self._index(device_index)
        reset = self._offered_by_allocator("reset_accumulated_memory_stats")
        if reset is not None:
            reset(index)

    def memory_stats(self, device_index: DeviceLike = None) -> dict[str, Any]:
        """Statistics of the allocator under torch's names, such as ``"allocated_bytes.all.peak"``.

        Delegates to: ``torch.<device>.memory_stats``, else ``torch.accelerator.memory_stats``. If they lack
            a peak, it is the largest figure read since the last reset.
        CPU: current and peak of ``allocated_bytes.all`` and ``reserved_bytes.all``.
        CUDA: ``torch.cuda.memory_stats``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        index = self._index(device_index)
        statistics = self._statistics(index)
        for kind in ("allocated", "reserved"):
            current, peak = f"{kind}_bytes.all.current", f"{kind}_bytes.all.peak"
            figure = getattr(self.torch_module, f"memory_{kind}", None)
            if current not in statistics and figure is not None:
                statistics[current] = int(figure(index))
            if current in statistics and peak not in statistics:
                # The allocator always holds what tensors occupy.
                known = (statistics[current], self._peaks_read.get((index, kind), 0))
                most = max(*known, statistics.get(_ALLOCATED_PEAK, 0))
                statistics[peak] = self._peaks_read[index, kind] = most
        return statistics

    def _statistics(self, index: int) -> dict[str, Any]:
        """Returns the statistics that torch has for a device; empty if it has none."""
        statistics = self._offered_by_allocator("memory_stats")
        return dict(statistics(index)) if statistics is not None else {}

    @functools.cached_property
    def _peaks_read(self) -> dict[tuple[int, str], int]:
        """The largest figures read since the last reset, by device, where the allocator keeps no peaks."""
        return {}

    def memory_summary(self, device: DeviceLike = None, abbreviated: bool = False) -> str:
        """The memory statistics of a device as readable text.

        Delegates to: ``torch.<device>.memory_summary``, else formats the figures above.
        CPU: allocated, peak, available and total.
        CUDA: ``torch.cuda.memory_summary``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        index = self._index(device)
        summary = getattr(self.torch_module, "memory_summary", None)
        if summary is not None:
            return str(summary(index, abbreviated))
        figures = {
            "allocated": self.memory_allocated(index),
            "allocated, peak": self.max_memory_allocated(index),
            "reserved": self.memory_reserved(index),
            "reserved, peak": self.max_memory_reserved(index),
            "available": self.available_memory(index),
            "total": self.total_memory(index),
        }
        rows = [f"  {name:<16} {size / 2**20:>12,.1f} MiB" for name, size in figures.items()]
        return "\n".join([f"Memory of {self.device_name(index)}", *rows])

    def _memory_info(self, index: int) -> tuple[int, int]:
        info = self._offered_by_allocator("mem_get_info", "get_memory_info")
        try:
            if info is not None:
                free, total = info(index)
                return int(free), int(total)
        except NotImplementedError:  # getMemoryInfo is optional for an allocator
            pass
        properties = self._offered("get_device_properties")
        found = properties(index) if properties is not None else None
        total = int(getattr(found, "total_memory", 0))
        held = max(self.memory_allocated(index), self.memory_reserved(index))
        return max(0, total - held), total

    def mem_get_info(self, device: DeviceLike = None) -> tuple[int, int]:
        """``(free, total)`` bytes of a device, over all processes.

        Delegates to: ``torch.<device>.mem_get_info``, else ``torch.accelerator.get_memory_info``, else the
            device's properties and :meth:`memory_reserved`.
        CPU: available and total memory within this process's cgroups.
        CUDA: ``torch.cuda.mem_get_info``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        return self._memory_info(self._index(device))

    def total_memory(self, device_index: DeviceLike = None) -> int:
        """The size of a device's memory in bytes.

        Delegates to: ``torch.<device>.get_device_properties(i).total_memory``, else :meth:`mem_get_info`.
        CPU: the host's memory, or the limit of this process's tightest cgroup.
        CUDA: ``torch.cuda.get_device_properties(i).total_memory``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        index = self._index(device_index)
        properties = self._offered("get_device_properties")
        total = getattr(properties(index), "total_memory", None) if properties is not None else None
        return int(total) if total is not None else self._memory_info(index)[1]

    def available_memory(self, device_index: DeviceLike = None) -> int:
        """Free bytes of a device, not counting the unused memory that this process's allocator holds.

        Delegates to: :meth:`mem_get_info`.
        CPU: the kernel's available memory, or the rest in this process's tightest cgroup.
        CUDA: free memory of ``torch.cuda.mem_get_info``.

        Raises:
            InvalidDeviceError: there is no such device.
        """
        return self.mem_get_info(device_index)[0]

    def ipc_collect(self) -> None:
        """Frees memory that was shared between processes and has been released.

        Delegates to: ``torch.<device>.ipc_collect``.
        CPU: does nothing.
        CUDA: ``torch.cuda.ipc_collect``.
        """
        collect = self._offered("ipc_collect")
        if collect is not None:
            collect()
