"""Refuses, during the capture of a recorded graph, work that a replay would silently get wrong.

The dispatcher does not show data that is read in place, seeding of random generators, or compiled code.
This module detects them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from acclimate.errors import GraphCaptureError

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
