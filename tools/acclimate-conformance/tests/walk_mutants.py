"""Faults planted in the emulated device that only show in a combination of calls, as walks make them."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from acclimate.accelerator import Accelerator, DeviceLike
from acclimate.accelerator.recorded_graph import RecordedGraph
from acclimate_sim.accelerator import SimAccelerator
from bounds_mutants import _Patched


def _is_elsewhere() -> bool:
    return threading.current_thread() is not threading.main_thread()


class ErrorsOnStreamsKeepTheDevice(SimAccelerator):
    """An error that leaves a device's block on a stream of the program's leaves its device current."""

    @contextmanager
    def device(self, device_index: DeviceLike = None) -> Iterator[None]:
        before = self.current_device()
        try:
            if device_index is not None:
                self.set_device(device_index)
            yield
        except BaseException:
            if self.current_stream() == self.default_stream():
                self.set_device(before)
            raise
        self.set_device(before)


class FiguresEndStreams(SimAccelerator):
    """Asking for a figure of memory of a device that is not current makes its default stream current."""

    def _figure(self, name: str, statistic: str, device_index: DeviceLike) -> int:
        index, here = self._index(device_index), self.current_device()
        if index != here:
            self.set_stream(self.default_stream(index))
            self.set_device(here)
        return super()._figure(name, statistic, device_index)


class PinsWhereTensorsAreMade(SimAccelerator):
    """pin_memory() asks for memory on the default device of torch."""

    def pin_memory(self, tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        torch.empty(1, pin_memory=True)
        return super().pin_memory(tensor, *args, **options)


class GrownViewsKeepTheirMemory(_Patched):
    """resize_() of a tensor of which there is a view keeps what it had before."""

    def patch(self) -> None:
        self._held: list[torch.Tensor] = []

        def resize(theirs: Any) -> Any:
            def call(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
                before = tensor.untyped_storage().nbytes()
                result: torch.Tensor = theirs(tensor, *args)
                if tensor.device.type == "sim" and tensor.untyped_storage().nbytes() > before > 1 << 20:
                    self._held.append(torch.empty(before, dtype=torch.uint8, device=tensor.device))
                return result

            return call

        self.put(torch.Tensor, "resize_", resize)


class PeaksOfThreadsStay(SimAccelerator):
    """In a second thread the peak of a device that is not current is not reset."""

    def reset_peak_memory_stats(self, device_index: DeviceLike = None) -> None:
        if not _is_elsewhere() or self._index(device_index) == self.current_device():
            super().reset_peak_memory_stats(device_index)


class InferenceDrawsAgain(_Patched):
    """torch.randint in inference_mode() leaves the state as it was."""

    def patch(self) -> None:
        def randint(theirs: Any) -> Any:
            def call(*args: Any, **options: Any) -> torch.Tensor:
                device = torch.device(options.get("device") or "cpu")
                if device.type != "sim" or not torch.is_inference_mode_enabled():
                    return theirs(*args, **options)
                state = self.get_rng_state(device)
                numbers: torch.Tensor = theirs(*args, **options)
                self.set_rng_state(state, device)
                return numbers

            return call

        self.put(torch, "randint", randint)


class StatesOfOtherThreadsGoAstray(SimAccelerator):
    """In a second thread a state is restored on the current device."""

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceLike = None) -> None:
        super().set_rng_state(new_state, None if _is_elsewhere() else device_index)


class _AtHome(torch.Stream):
    def wait_event(self, event: Any) -> None:
        if torch.accelerator.current_device_index() == self.device.index:
            super().wait_event(event)


class StreamsWaitAtHome(SimAccelerator):
    """A stream's wait for an event is ignored while another device is current."""

    Stream = _AtHome


class ResetsOfOthersEndReplays(SimAccelerator):
    """Once a capture has ended by an error, graphs of before are not replayed any more."""

    def replay_graph(self, graph: Any) -> None:
        if getattr(graph, "born", 0) == self._failures:
            super().replay_graph(graph)

    def create_graph(self) -> Any:
        graph = super().create_graph()
        graph.born = self._failures
        return graph

    _failures = 0

    @contextmanager
    def capture_to_graph(
        self, graph: Any, pool: Any | None = None, stream: Any | None = None
    ) -> Iterator[Any]:
        try:
            with super().capture_to_graph(graph, pool, stream) as given:
                yield given
        except BaseException:
            type(self)._failures += 1
            raise


class ReplaysOnOtherStreamsAreOne(SimAccelerator):
    """Of replays on a stream that is not the default one, the second in a row is left out."""

    _last: Any = None

    def replay_graph(self, graph: Any) -> None:
        here = self.current_stream()
        is_second = here != self.default_stream() and self._last is graph
        self._last = graph if here != self.default_stream() and not is_second else None
        if not is_second:
            super().replay_graph(graph)


class SlicesAreLoadedAlone(_Patched):
    """torch.load() with mmap gives each tensor after the first memory of its own."""

    def patch(self) -> None:
        def load(theirs: Any) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                found = theirs(*args, **options)
                if options.get("mmap") and isinstance(found, dict):
                    first, *others = found["tensors"]
                    found["tensors"] = [first, *map(copy.deepcopy, others)]
                return found

            return call

        self.put(torch, "load", load)


class RestoredStatesMissGraphs(SimAccelerator):
    """The first replay after set_rng_state() leaves the state as it was."""

    _restored = False

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceLike = None) -> None:
        super().set_rng_state(new_state, device_index)
        self._restored = True

    def replay_graph(self, graph: Any) -> None:
        states = self.get_rng_state_all() if self._restored else []
        super().replay_graph(graph)
        for index, state in enumerate(states):
            super().set_rng_state(state, index)
        self._restored = False


class ReplaysOfThreadsKeepMemory(SimAccelerator):
    """Each replay in a second thread keeps 1 MiB of the current device."""

    def replay_graph(self, graph: Any) -> None:
        super().replay_graph(graph)
        if _is_elsewhere():
            self.__dict__.setdefault("_kept_for_ever", []).append(
                torch.empty(1 << 20, dtype=torch.uint8, device=self.current_device_name())
            )


class DroppedGraphsKeepMemory(SimAccelerator):
    """A graph that is dropped while another device is current keeps 2 MiB."""

    def create_graph(self) -> Any:
        graph, here = super().create_graph(), self.current_device()
        held = [torch.empty(2 << 20, dtype=torch.uint8, device=self.current_device_name())]

        def dropped() -> None:
            if self.current_device() == here:
                held.clear()

        weakref.finalize(graph, dropped)
        self.__dict__.setdefault("_all_held", []).append(held)
        return graph


class ResetsEndReplays(SimAccelerator):
    """Once a graph was reset, the next replay of another does nothing."""

    def create_graph(self) -> Any:
        owner = self

        class Graph(RecordedGraph):
            def reset(self) -> None:
                super().reset()
                owner._was_reset = True

        return Graph()

    def replay_graph(self, graph: Any) -> None:
        if not self._was_reset:
            super().replay_graph(graph)
        self._was_reset = False

    _was_reset = False


CAUGHT_BY: dict[str, dict[type[Accelerator], str]] = {
    "": {
        ErrorsOnStreamsKeepTheDevice: "devices/walks_over_what_is_current",
        FiguresEndStreams: "devices/walks_over_what_is_current",
        PinsWhereTensorsAreMade: "devices/walks_over_what_is_current",
        GrownViewsKeepTheirMemory: "memory/walks_over_memory",
        PeaksOfThreadsStay: "memory/walks_over_memory",
        InferenceDrawsAgain: "random/walks_over_random_numbers",
        StatesOfOtherThreadsGoAstray: "random/walks_over_random_numbers",
        RestoredStatesMissGraphs: "random/walks_over_random_numbers",
        ReplaysOfThreadsKeepMemory: "memory/walks_over_memory",
        DroppedGraphsKeepMemory: "memory/walks_over_memory",
        ResetsEndReplays: "graphs/walks_over_graphs",
        SlicesAreLoadedAlone: "runtime/walks_over_saved_tensors",
        ResetsOfOthersEndReplays: "graphs/walks_over_graphs",
        ReplaysOnOtherStreamsAreOne: "graphs/walks_over_graphs",
    },
    "sync=check": {StreamsWaitAtHome: "streams/walks_over_streams"},
}
"""By profile of the device: each fault, and the check that has to find it."""
