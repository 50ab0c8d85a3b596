"""Graphs: capture work once, replay it many times."""

from __future__ import annotations

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
    """Whether work can be captured. Where a backend says no, :meth:`create_graph` raises, and the checks of
    graphs count as not offered.

    CPU: true, of recorded operators.
    CUDA: true.
    """

    def _graph_class(self) -> type[Any] | None:
        """The graph class of the device's torch module, named as all of them are (``CUDAGraph``,
        ``XPUGraph``, ``NPUGraph``); None where it has none."""
        found: type[Any] | None = getattr(self.torch_module, f"{self.device_type.upper()}Graph", None)
        return found

    def create_graph(self) -> Any:
        """An empty graph for :meth:`capture_to_graph`, with at least ``replay()`` and ``reset()``.

        Delegates to: ``torch.<device>.<DEVICE>Graph``, else ``torch.accelerator.Graph`` where torch has
            one for this device, else :class:`~acclimate.accelerator.recorded_graph.RecordedGraph`.
        CPU: a graph of recorded torch operators.
        CUDA: ``torch.cuda.CUDAGraph``.

        Raises:
            UnsupportedError: the accelerator says that it has no graphs.
        """
        if not self.supports_graphs:
            raise UnsupportedError(
                f"The {self.name} accelerator has no graphs. Run the work without capturing it."
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
        """A context manager within which work is captured into ``graph``.

        Run the work once before: what a first run makes, such as an optimizer's state, each replay would
        make anew. Capture a backward pass together with its forward pass.

        Args:
            graph: what :meth:`create_graph` returned.
            pool: of another graph, to share its memory; the host has no use for it.
            stream: the stream to capture on; the host has no use for it.

        Delegates to: ``torch.<device>.graph`` for a graph of that module, else the graph's own context
            manager.
        CPU: records torch operators while they run; refuses what a replay would get wrong.
        CUDA: ``torch.cuda.graph``.

        Raises:
            GraphCaptureError: ``graph`` is not a graph of this accelerator; within the block: a value is
                read back to the host, or another capture is under way.
        """
        if isinstance(graph, RecordedGraph):
            return RecordedCapture(graph)
        if not hasattr(graph, "replay"):
            raise GraphCaptureError(
                f"{type(graph).__name__} is not a graph of the {self.name} accelerator; "
                "make one with create_graph()."
            )
        native = self._graph_class()
        context: AbstractContextManager[Any] = graph
        if native is not None and isinstance(graph, native):
            options = {"pool": pool} if pool is not None else {}  # not every vendor's graphs share memory
            context = self.torch_module.graph(graph, stream=stream, **options)
            return context
        if pool is not None:
            graph.graph_pool = pool
        return context if stream is None else _within(self.stream(stream), graph)

    def replay_graph(self, graph: Any) -> None:
        """Runs the captured work again, on what the captured tensors hold now.

        Delegates to: ``graph.replay``.
        CPU: runs the recorded operators and writes into the tensors of the capture.
        CUDA: ``graph.replay``.

        Raises:
            GraphCaptureError: nothing was captured, or a shape differs from the capture's.
        """
        graph.replay()

    def is_current_stream_capturing(self) -> bool:
        """Whether work of this thread is being captured into a graph.

        Delegates to: ``torch.<device>.is_current_stream_capturing``, else what this module knows.
        CPU: whether this thread is inside :meth:`capture_to_graph`.
        CUDA: ``torch.cuda.is_current_stream_capturing``.
        """
        capturing = self._offered("is_current_stream_capturing")
        return is_recording() or (bool(capturing()) if capturing is not None else False)


@contextmanager
def _within(stream: AbstractContextManager[Any], graph: Any) -> Iterator[Any]:
    with stream, graph:
        yield graph
