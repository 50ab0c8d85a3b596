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


CAUGHT_BY: dict[str, dict[type[Accelerator], str]] = {
    "": {
        StreamsKeepTheProcess: "launching/processes_end",
        CapturesEndTheProcess: "launching/processes_end",
        PinnedMemoryHidesSignals: "launching/processes_end",
        RangesCloseTheDevice: "launching/processes_end",
        SentIntegersChange: "runtime/workers_draw_their_own_numbers",
    },
}
"""By profile of the device: each fault, and the check that has to find it."""
