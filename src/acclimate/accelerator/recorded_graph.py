"""A graph for devices without one of their own: torch operators are recorded, and run again on replay.

It keeps the contract of CUDA graphs. Work in the capture runs once, on the tensors it names; a replay runs
the same operators on the same tensors, so that results appear where they appeared during the capture, from
whatever the input tensors hold now. What cannot be replayed right is refused during the capture: a value
read back to the host (Python may have branched on it), and compiled code that torch's dispatcher does not
see.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from acclimate.errors import GraphCaptureError

_capturing = threading.local()


def is_recording() -> bool:
    """Whether this thread is inside the capture of a :class:`RecordedGraph`."""
    return getattr(_capturing, "graph", None) is not None


@dataclass(frozen=True)
class _Call:
    """One operator of a graph, with the tensors it read and the new tensors it made."""

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[int, torch.Tensor], ...]  # position among the results, and the tensor to refill


class RecordedGraph:
    """Operators captured by :class:`RecordedCapture`, to be replayed."""

    def __init__(self) -> None:
        self._calls: list[_Call] | None = None

    def replay(self) -> None:
        """Runs the captured operators again.

        Raises:
            GraphCaptureError: nothing was captured, or an operator now gives another shape than during
                the capture, which a graph cannot express.
        """
        if self._calls is None:
            raise GraphCaptureError("This graph holds no capture. Use `with acc.capture_to_graph(graph):`.")
        with torch.no_grad():
            for call in self._calls:
                _run_again(call)

    def reset(self) -> None:
        """Forgets the capture and releases its tensors."""
        self._calls = None


def _run_again(call: _Call) -> None:
    returned = tree_leaves(call.operator(*call.args, **call.kwargs))
    for position, captured in call.results:
        result = returned[position]
        if result.shape != captured.shape or result.dtype != captured.dtype:
            raise GraphCaptureError(
                f"{call.operator} gave shape {tuple(captured.shape)} during the capture and "
                f"{tuple(result.shape)} now. A graph replays fixed shapes: keep data-dependent "
                "operators out of it."
            )
        captured.copy_(result)


class RecordedCapture(TorchDispatchMode):
    """The context manager within which operators are recorded into a graph.

    Args:
        graph: what to record into; an earlier capture in it is replaced when this one succeeds.
    """

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph
        self._calls: list[_Call] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs one operator and records it."""
        kwargs = kwargs or {}
        if func in _READS_TO_HOST:
            raise GraphCaptureError(
                f"{func} reads a value back to the host during a graph capture. A replay could not follow "
                "what Python does with it; keep .item(), print and comparisons of tensors out of the capture."
            )
        # Which storages exist before the call, since an operator that returns an input (in place, out=) or
        # a view of one needs no refill: replaying it writes to, or looks at, the same memory.
        known = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        # An argument is kept by reference, and a list of them copied, as the caller may change its list.
        leaves, spec = tree_flatten((args, kwargs))
        result = func(*args, **kwargs)
        fresh = tuple(
            (position, leaf)
            for position, leaf in enumerate(tree_leaves(result))
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in known
        )
        kept_args, kept_kwargs = tree_unflatten(leaves, spec)
        self._calls.append(_Call(func, kept_args, kept_kwargs, fresh))
        return result

    def __enter__(self) -> RecordedCapture:
        if is_recording():
            raise GraphCaptureError("A graph capture is already under way in this thread.")
        _capturing.graph = self._graph
        self._calls = []
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        _capturing.graph = None
        if exc_type is None:
            self._graph._calls = self._calls


_READS_TO_HOST = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
}


def _storage(tensor: torch.Tensor) -> int:
    # Sparse and other opaque tensors have no storage of their own to compare; they count as themselves.
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return id(tensor)
