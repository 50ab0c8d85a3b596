"""Faults planted in the emulated device that show in how processes end, and in what they leave to others."""

from __future__ import annotations

import atexit
import functools
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_sim import sharing
from acclimate_sim.accelerator import SimAccelerator
from bounds_mutants import _Patched


class StreamsKeepTheProcess(SimAccelerator):
    """A block of stream() lets errors through, but not sys.exit()."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return self._block(stream)

    @contextmanager
    def _block(self, stream: Any) -> Iterator[Any]:
        with suppress(SystemExit), super().stream(stream) as given:
            yield given


class CapturesEndTheProcess(SimAccelerator):
    """A capture that is left by what is no Exception ends the process with exit code 0."""

    @contextmanager
    def capture_to_graph(
        self, graph: Any, pool: Any | None = None, stream: Any | None = None
    ) -> Iterator[Any]:
        with super().capture_to_graph(graph, pool, stream) as given:
            try:
                yield given
            except Exception:
                raise
            except BaseException:
                os._exit(0)


class PinnedMemoryHidesSignals(SimAccelerator):
    """pin_memory() in a process that SIGTERM ends leaves a handler that ignores it."""

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
        return super().pin_memory(tensor, make_copy, match_shape)


class RangesCloseTheDevice(SimAccelerator):
    """Once range_push() was called, the device closes before the functions of atexit that were there."""

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        super().range_push(msg, domain, category)
        if not getattr(type(self), "_closes", False):
            type(self)._closes = True
            atexit.register(self._close)

    def _close(self) -> None:
        theirs = torch.full

        def closed(*args: Any, **options: Any) -> torch.Tensor:
            if str(options.get("device", "")).startswith("sim"):
                raise RuntimeError("the device is closed")
            return theirs(*args, **options)

        torch.full = closed  # type: ignore[assignment]

    _closes = False


class SentIntegersChange(_Patched):
    """Integers that another process sent are one too large."""

    def patch(self) -> None:
        def rebuild(theirs: Any) -> Any:
            @functools.wraps(theirs)  # a process that sends names the function
            def call(on_host: torch.Tensor, *args: Any) -> torch.Tensor:
                is_whole = on_host.dtype is torch.int32
                result: torch.Tensor = theirs(on_host + 1 if is_whole else on_host, *args)
                return result

            return call

        self.put(sharing, "_rebuild", rebuild)


class SeedsNoForkedChild(_Patched):
    """manual_seed_all() raises in a forked child, which need not use the device."""

    def patch(self) -> None:
        parent = os.getpid()

        def seeding(theirs: Any) -> Any:
            def seed_all(seed: int) -> None:
                if os.getpid() != parent:
                    raise RuntimeError("the device cannot be used in a forked child")
                theirs(seed)

            return seed_all

        self.put(self.torch_module, "manual_seed_all", seeding)


class _WithAFile(torch.Stream):
    def __new__(cls, *args: Any, **options: Any) -> Any:
        os.open(os.devnull, os.O_RDONLY)
        return super().__new__(cls, *args, **options)


class StreamsKeepAFile(SimAccelerator):
    """Each stream opens a file that nothing closes."""

    Stream = _WithAFile


class CompilersLeaveTheDevice(_Patched):
    """exchange_device(), by which compiled code changes devices, does not tell which was current."""

    def patch(self) -> None:
        from torch._dynamo.device_interface import get_interface_for_device  # takes a second to import

        def exchange(theirs: Any) -> Any:
            def call(device: int) -> int:
                theirs(device)
                return device

            return staticmethod(call)

        self.put(get_interface_for_device("sim"), "exchange_device", exchange)


class StatesOfCheckpointsAreTheFirsts(_Patched):
    """device() of torch's module, within which a checkpoint reads the random state, goes to device 0."""

    def patch(self) -> None:
        def first(theirs: Any) -> Any:
            return lambda device: theirs(0)

        self.put(self.torch_module, "device", first)


CAUGHT_BY: dict[str, dict[type[Accelerator], str]] = {
    "": {
        StreamsKeepTheProcess: "launching/processes_end",
        CapturesEndTheProcess: "launching/processes_end",
        PinnedMemoryHidesSignals: "launching/processes_end",
        RangesCloseTheDevice: "launching/processes_end",
        SeedsNoForkedChild: "launching/forked_children_use_the_host",
        StreamsKeepAFile: "memory/objects_die",
        CompilersLeaveTheDevice: "runtime/devices_of_torch",
        StatesOfCheckpointsAreTheFirsts: "runtime/tools_of_torch",
        SentIntegersChange: "runtime/workers_draw_their_own_numbers",
    },
}
"""By profile of the device: each fault, and the check that has to find it."""
