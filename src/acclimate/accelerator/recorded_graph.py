"""A graph for devices without native graphs: it records torch operators and runs them again on replay.

It has the semantics of CUDA graphs. The capture runs the work once; a replay runs the same operators on the
same memory, so that results for the present inputs appear in the same tensors. Work that cannot be replayed
correctly is refused: a value read back to the host (Python may have branched on it), a random generator that
is seeded in between, a shape that depends on data.

It records operators that pass torch's dispatcher in the capturing thread. Work of other threads, and of
native code that computes on a tensor's address, is not recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from acclimate.accelerator import unreplayable
from acclimate.errors import GraphCaptureError

_capturing = threading.local()


def is_recording() -> bool:
    """Whether this thread is inside the capture of a :class:`RecordedGraph`."""
    return getattr(_capturing, "graph", None) is not None


# -- replay ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Result:
    """A tensor that an operator returned during the capture."""

    position: int  # among the operator's results
    tensor: torch.Tensor
    is_fresh: bool  # has its own memory, to be refilled; not an argument's

    def take(self, result: torch.Tensor, operator: Any) -> None:
        """Copies a replayed result into the tensor of the capture."""
        then = self.tensor
        if result.shape != then.shape or result.dtype != then.dtype:
            raise _changed(operator, f"shape {tuple(then.shape)}", tuple(result.shape))
        if self.is_fresh:
            then.copy_(result)
        elif result.layout is torch.strided and _place(result) != _place(then):
            # A view, or an output given by the caller, who reads it at its old place.
            raise _changed(operator, f"strides and offset {_place(then)}", _place(result))


@dataclass(frozen=True)
class _Call:
    """One operator of a graph, its arguments and its results."""

    operator: Any  # an OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[_Result, ...]

    def run(self) -> None:
        returned = tree_leaves(self.operator(*self.args, **self.kwargs))
        _wait(self.operator, returned)
        for result in self.results:
            result.take(returned[result.position], self.operator)


class RecordedGraph:
    """Operators captured by :class:`RecordedCapture`, for replay."""

    def __init__(self) -> None:
        self._calls: list[_Call] | None = None

    def replay(self) -> None:
        """Runs the captured operators again.

        Raises:
            GraphCaptureError: nothing was captured, or an operator's result has another shape than during the
                capture.
        """
        if self._calls is None:
            raise GraphCaptureError("This graph holds no capture. Use `with acc.capture_to_graph(graph):`.")
        # The capture is below autograd and autocast, so their work was recorded. Inference mode, since
        # tensors made in it can only be written in it.
        with torch.inference_mode(), torch._C._DisableAutocast():
            for call in self._calls:
                call.run()

    def reset(self) -> None:
        """Drops the capture and its tensors."""
        self._calls = None


def _wait(operator: Any, returned: Iterable[Any]) -> None:
    """Waits for a collective, which returns before its work is done; in the capture the caller waited."""
    if operator.namespace == "c10d":
        for leaf in returned:
            if isinstance(leaf, torch.ScriptObject):
                leaf.wait()  # type: ignore[attr-defined]  # a torch.classes.c10d.Work
    elif operator.namespace == "_c10d_functional":
        for leaf in returned:
            torch.ops._c10d_functional.wait_tensor(leaf)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.stride(), tensor.storage_offset()


def _changed(operator: Any, then: str, now: object) -> GraphCaptureError:
    return GraphCaptureError(
        f"{operator} returned {then} during the capture and {now} now. A graph replays fixed shapes; "
        "do not capture operators whose shape depends on data."
    )


# -- capture ---------------------------------------------------------------------------------------


class RecordedCapture(TorchDispatchMode):
    """A context manager that records operators into a graph.

    Args:
        graph: the graph to record into; if the capture succeeds, it replaces an earlier one.
    """

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph
        self._calls: list[_Call] = []
        self._python_calls = unreplayable.PythonCalls()
        self._random = unreplayable.RandomNumbers()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs one operator and records it."""
        kwargs = kwargs or {}
        inputs = tree_leaves((args, kwargs))
        if unreplayable.reads_data(func, inputs):
            raise unreplayable.reading_refused(func)
        self._random.before(inputs)
        # The memory that existed before the call: a result that is an argument (in place, out=) or a view of
        # one needs no refill, since a replay uses the same memory.
        known = {_storage(leaf) for leaf in inputs if isinstance(leaf, torch.Tensor)}
        kept_args, kept_kwargs = tree_map(_alias, (args, kwargs))
        result = func(*args, **kwargs)
        self._random.after(func)
        if func is torch.ops.aten.lift_fresh.default and result.untyped_storage().resizable():
            # torch.tensor(data): the capture may change it, so each replay starts from the data. (Memory that
            # is not resizable belongs to another library, such as numpy: an input.)
            constant = (result.detach().clone(),)
            self._calls.append(
                _Call(torch.ops.aten.clone.default, constant, {}, (_Result(0, _alias(result), True),))
            )
        elif torch.Tag.inplace_view not in func.tags and func.namespace != "profiler":
            # Operators such as t_, resize_ and set_ change only the tensor's shape or memory; the aliases of
            # each call have both. Profiler marks are not replayed.
            results = tuple(
                _Result(position, _alias(leaf), is_fresh=_storage(leaf) not in known)
                for position, leaf in enumerate(tree_leaves(result))
                if isinstance(leaf, torch.Tensor)
            )
            self._calls.append(_Call(func, kept_args, kept_kwargs, results))
        return result

    def __enter__(self) -> RecordedCapture:
        if is_recording():
            raise GraphCaptureError("A graph capture is already in progress in this thread.")
        self._calls, self._random = [], unreplayable.RandomNumbers()
        _capturing.graph = self._graph
        self._python_calls.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        self._python_calls.__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        _capturing.graph = None
        if exc_type is None:
            self._random.before(())
            self._graph._calls = self._calls


def _alias(value: Any) -> Any:
    """Returns a view of a tensor, so that a later t_(), set_() or ``.data =`` on the tensor does not affect
    calls recorded before."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        return value
    # Below autograd a view has its own version counter. With this key it shares its base's counter, so that a
    # backward pass that saved the base before a replay fails instead of using values written by the replay.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def _storage(tensor: torch.Tensor) -> int:
    # Sparse and other opaque tensors have no storage; they are compared by identity.
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return id(tensor)
