"""What a recorded graph refuses during its capture, as a replay would get it wrong without a word.

The dispatcher shows operators; what it does not show (data read in place, random generators that are set,
compiled code) is found here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from acclimate.errors import GraphCaptureError

_NUMBERS = {"NumberType", "FloatType", "IntType", "BoolType", "ComplexType", "StringType"}
# torch's own operators that give Python what tensors hold. (Many others return numbers and look at no data.)
_ATEN_READERS = {
    "_choose_qparams_per_tensor",
    "_local_scalar_dense",
    "_nested_tensor_from_mask_left_aligned",
    "_pack_padded_sequence",  # returns tensors, from which torch's recurrent layers then read lengths
    "allclose",
    "equal",
    "is_nonzero",
    "item",
}


def refuse_reading(func: Any, inputs: Iterable[Any]) -> None:
    """Refuses an operator that makes Python numbers from the data of its tensors.

    Raises:
        GraphCaptureError: it does.
    """
    if func.namespace == "aten":
        reads = func.overloadpacket.__name__ in _ATEN_READERS
    else:
        returns = func._schema.returns
        reads = (
            bool(returns)
            and all(value.type.kind() in _NUMBERS for value in returns)
            and any(isinstance(leaf, torch.Tensor) for leaf in inputs)
        )
    if reads:
        raise _reading(func)


def _reading(function: Any) -> GraphCaptureError:
    return GraphCaptureError(
        f"{getattr(function, '__name__', function)} reads a value back to the host during a graph capture. "
        "A replay could not follow what Python does with it; keep .item(), .tolist(), .numpy(), print and "
        "comparisons of tensors out of the capture."
    )


class RandomNumbers:
    """Watches the host's default generator during a capture.

    What sets it is no operator, so a replay would draw on from where it is, instead of starting from where it
    was set.
    """

    def __init__(self) -> None:
        self._state = torch.default_generator.get_state()
        self._drawn = False
        self._set = False

    def before(self, inputs: Iterable[Any]) -> None:
        """Looks at what happened since the last operator, and at the next one's arguments.

        Raises:
            GraphCaptureError: a generator was set, or is not the default one.
        """
        self._set |= not torch.equal(self._state, torch.default_generator.get_state())
        if self._set and self._drawn:
            raise GraphCaptureError(
                "The state of the random generator was set during a graph capture that also draws from it "
                "(manual_seed, fork_rng, or activation checkpointing with dropout). Set it before the "
                "capture or before a replay."
            )
        generators = {_identity(leaf) for leaf in inputs if isinstance(leaf, torch.Generator)}
        if generators - {_identity(torch.default_generator)}:
            raise GraphCaptureError(
                "A generator other than the default one is used during a graph capture, which cannot tell "
                "where its numbers start. Draw from the default one."
            )

    def after(self, func: Any) -> None:
        """Looks at what an operator drew."""
        state = torch.default_generator.get_state()
        # torch marks its own operators that draw; any other change of state is another thread's.
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
            self._drawn |= not torch.equal(self._state, state)
        self._state = state


def _identity(generator: torch.Generator) -> int:
    # What an operator is given is another Python object over the same generator.
    return int(generator._cdata)  # type: ignore[attr-defined]


class PythonCalls(TorchFunctionMode):
    """Refuses calls of torch's Python interface whose reading of data the dispatcher does not see."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Lets through what a replay can follow."""
        kwargs = kwargs or {}
        if func in _READS_IN_PLACE:
            raise _reading(func)
        if func in _DATA_TENSORS or func in _BACKWARD:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if len(tensors) > _DATA_TENSORS.get(func, len(tensors)):
                raise _reading(func)
            if func in _BACKWARD and _runs_compiled_code(tensors):
                raise GraphCaptureError(
                    "A backward pass that torch.compile made cannot be captured by itself, as its operators "
                    "are not seen. Capture the forward pass with it, or do not compile it."
                )
        return func(*args, **kwargs)


_READS_IN_PLACE = {
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.__repr__,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
}
# Functions that read lengths from tensors beyond so many that hold data.
_DATA_TENSORS: dict[Callable[..., Any], int] = {
    torch.Tensor.tensor_split: 1,
    torch.tensor_split: 1,
    torch.ctc_loss: 2,
    torch.nn.functional.ctc_loss: 2,
}
_BACKWARD = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}


def _runs_compiled_code(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a backward pass from these tensors would run a node that torch.compile made."""
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
