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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

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
        self._python_calls = PythonCalls()
        self._random = RandomNumbers()

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
        if reads_data(func, inputs):
            raise reading_refused(func)
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
        self._calls, self._random = [], RandomNumbers()
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


# -- refusal ---------------------------------------------------------------------------------------
# The dispatcher does not show data that is read in place, seeding of random generators, or compiled code.

_NUMBERS = {"NumberType", "FloatType", "IntType", "BoolType", "ComplexType", "StringType"}
# torch's operators that return tensors' data to Python. (Many others return numbers without reading data.)
_ATEN_READERS = {
    "_choose_qparams_per_tensor",
    "_local_scalar_dense",
    "_nested_tensor_from_mask_left_aligned",
    "_pack_padded_sequence",  # torch's recurrent layers read lengths from the tensors it returns
    "allclose",
    "equal",
    "is_nonzero",
    "item",
}
READS_IN_PLACE = {
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
}
"""The methods that read a tensor's memory without dispatching an operator."""


def reads_data(func: Any, inputs: Iterable[Any]) -> bool:
    """Whether an operator returns tensors' data as Python numbers."""
    if func.namespace == "aten":
        return func.overloadpacket.__name__ in _ATEN_READERS
    returns = func._schema.returns
    return (
        bool(returns)
        and all(value.type.kind() in _NUMBERS for value in returns)
        and any(isinstance(leaf, torch.Tensor) for leaf in inputs)
    )


def reading_refused(function: Any) -> GraphCaptureError:
    """Returns the error for a function that reads tensors' data."""
    return GraphCaptureError(
        f"{getattr(function, '__name__', function)} reads a value back to the host during a graph capture. "
        "A replay could not repeat what Python does with it; move .item(), .tolist(), .numpy(), print and "
        "comparisons of tensors out of the capture."
    )


class RandomNumbers:
    """Watches the host's default generator during a capture.

    Seeding is not an operator, so a replay would continue with the generator's present state instead of the
    seed.
    """

    def __init__(self) -> None:
        self._state = torch.default_generator.get_state()
        self._drawn = False
        self._set = False

    def before(self, inputs: Iterable[Any]) -> None:
        """Checks for changes of the generator since the last operator, and the next one's arguments.

        Raises:
            GraphCaptureError: the generator was seeded, or an argument is another generator.
        """
        self._set |= not torch.equal(self._state, torch.default_generator.get_state())
        if self._set and self._drawn:
            raise GraphCaptureError(
                "The state of the random generator was set during a graph capture that also uses it "
                "(manual_seed, fork_rng, or activation checkpointing with dropout). Set it before the "
                "capture or before a replay."
            )
        generators = {_identity(leaf) for leaf in inputs if isinstance(leaf, torch.Generator)}
        if generators - {_identity(torch.default_generator)}:
            raise GraphCaptureError(
                "A graph capture cannot record the state of a random generator other than the default one. "
                "Use the default generator."
            )

    def after(self, func: Any) -> None:
        """Records whether an operator used the generator."""
        state = torch.default_generator.get_state()
        # torch tags its random operators; any other change of state comes from another thread.
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
            self._drawn |= not torch.equal(self._state, state)
        self._state = state


def _identity(generator: torch.Generator) -> int:
    # Operators receive another Python object for the same generator.
    return int(generator._cdata)  # type: ignore[attr-defined]


class PythonCalls(TorchFunctionMode):
    """Refuses calls of torch's Python API that read data without the dispatcher's knowledge."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls functions that a replay can repeat, and refuses others."""
        kwargs = kwargs or {}
        if func in READS_IN_PLACE or func is torch.Tensor.__repr__:
            raise reading_refused(func)
        if func in _DATA_TENSORS or func in _BACKWARD:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if len(tensors) > _DATA_TENSORS.get(func, len(tensors)):
                raise reading_refused(func)
            if func in _BACKWARD and _runs_compiled_code(tensors):
                raise GraphCaptureError(
                    "A backward pass that torch.compile made cannot be captured on its own. Capture the "
                    "forward pass as well, or do not compile it."
                )
        return func(*args, **kwargs)


# Functions that read lengths from tensors, with the number of tensors that hold data.
_DATA_TENSORS: dict[Callable[..., Any], int] = {
    torch.Tensor.tensor_split: 1,
    torch.tensor_split: 1,
    torch.ctc_loss: 2,
    torch.nn.functional.ctc_loss: 2,
}
_BACKWARD = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}


def _runs_compiled_code(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a backward pass from these tensors would run code that torch.compile made."""
    nodes = [tensor.grad_fn for tensor in tensors]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CompiledFunctionBackward":
            return True
        seen.add(node)
        nodes.extend(next_node for next_node, _ in node.next_functions)
    return False
