"""Graphs: work that is captured once and replayed many times."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch

from acclimate.accelerator.recorded_graph import RecordedCapture, RecordedGraph, is_recording
from acclimate.accelerator.streams import Streams
from acclimate.errors import GraphCaptureError, UnsupportedError


class Graphs(Streams):
    """Captured work of a device."""

    supports_graphs: ClassVar[bool] = True
    """Whether work can be captured. If not, :meth:`create_graph` raises, and the conformance checks of graphs
    count as not offered.

    CPU: true, of recorded operators.
    CUDA: true.
    """

    def _graph_class(self) -> type[Any] | None:
        """Returns the graph class of the device's torch module (``CUDAGraph``, ``XPUGraph``, ``NPUGraph``),
        or None."""
        found: type[Any] | None = getattr(self.torch_module, f"{self.device_type.upper()}Graph", None)
        return found

    def create_graph(self) -> Any:
        """An empty graph for :meth:`capture_to_graph`, with at least ``replay()`` and ``reset()``.

        Delegates to: ``torch.<device>.<DEVICE>Graph``, else ``torch.accelerator.Graph`` if torch supports
            this device, else :class:`~acclimate.accelerator.recorded_graph.RecordedGraph`.
        CPU: a graph of recorded torch operators.
        CUDA: ``torch.cuda.CUDAGraph``.

        Raises:
            UnsupportedError: the accelerator says that it has no graphs.
        """
        if not self.supports_graphs:
            raise UnsupportedError(
                f"The {self.name} accelerator has no graphs. Run the work without a capture."
            )
        native = self._graph_class()
        if native is not None:
            return native()
        graph = getattr(torch.accelerator, "Graph", None)
        if graph is not None and self._is_torch_accelerator():
            try:
                return graph()
            except (RuntimeError, NotImplementedError):
                pass  # this device has registered no graph implementation with torch
        return RecordedGraph()

    def capture_to_graph(
        self, graph: Any, pool: Any | None = None, stream: Any | None = None
    ) -> AbstractContextManager[Any]:
        """A context manager that captures work into ``graph``.

        Run the work once before the capture: a replay would repeat what only a first run does, such as
        creating an optimizer's state. Capture a backward pass together with its forward pass.

        Args:
            graph: a graph from :meth:`create_graph`.
            pool: another graph's memory pool to share; ignored on the host.
            stream: the stream to capture on; ignored on the host.

        Delegates to: ``torch.<device>.graph`` for a graph of that module, else the graph's own context
            manager.
        CPU: records torch operators while they run; refuses work that a replay could not repeat correctly.
        CUDA: ``torch.cuda.graph``.

        Raises:
            GraphCaptureError: ``graph`` is not a graph of this accelerator; in the block, a value is read
                back to the host; or another capture is in progress.
        """
        if isinstance(graph, RecordedGraph):
            return RecordedCapture(graph)
        if not hasattr(graph, "replay"):
            raise GraphCaptureError(
                f"{type(graph).__name__} is not a graph of the {self.name} accelerator; "
                "make one with create_graph()."
            )
        native = self._graph_class()
        if native is not None and isinstance(graph, native):
            options = {"pool": pool} if pool is not None else {}  # some vendors' graphs have no pool
            return self._capture_by_module(graph, stream=stream, **options)
        if pool is not None:
            graph.graph_pool = pool
        return _within(self.stream(stream), graph)

    def _capture_beside_other_threads(self, graph: Any) -> AbstractContextManager[Any]:
        """As :meth:`capture_to_graph`; other threads may allocate memory where the device allows it."""
        native = self._graph_class()
        if native is None or not isinstance(graph, native):
            return self.capture_to_graph(graph)
        takes_mode = "capture_error_mode" in inspect.signature(self.torch_module.graph).parameters
        return self._capture_by_module(
            graph, **({"capture_error_mode": "thread_local"} if takes_mode else {})
        )

    @contextmanager
    def _capture_by_module(self, graph: Any, **options: Any) -> Iterator[Any]:
        # If torch fails to begin or to end a capture, its context manager leaves its own stream current.
        with self.stream(self.current_stream()), self.torch_module.graph(graph, **options) as given:
            yield given

    def replay_graph(self, graph: Any) -> None:
        """Runs the captured work again, on the present values of the captured tensors.

        Delegates to: ``graph.replay``.
        CPU: runs the recorded operators and writes to the tensors of the capture.
        CUDA: ``graph.replay``.

        Raises:
            GraphCaptureError: nothing was captured, or a shape differs from that in the capture.
        """
        graph.replay()

    def is_current_stream_capturing(self) -> bool:
        """Whether this thread's work is being captured into a graph.

        Delegates to: ``torch.<device>.is_current_stream_capturing``; also true during a recorded capture.
        CPU: whether this thread is inside :meth:`capture_to_graph`.
        CUDA: ``torch.cuda.is_current_stream_capturing``.
        """
        capturing = self._offered("is_current_stream_capturing")
        return is_recording() or (bool(capturing()) if capturing is not None else False)


@contextmanager
def _within(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[Any]:
    with outer, inner as entered:
        yield entered
