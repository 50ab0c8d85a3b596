"""Operators on fake tensors, whose symbolic sizes torch computes once for calls that are alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from acclimate.llm.decode.description import NotRepresentedError
from acclimate.llm.decode.shadow_operators import NAME

BATCH, LENGTH = 3, 7
"""Example sizes; no guard may depend on them."""
_NUMBERS = {"linear": (1,), "rows": (1,), "past": (2, 3), "inputs": (2,), "kept_inputs": (3,), "state": (2,)}
"""Arguments of the shadow's operators that only name a module or a layer, by their places."""


Results: TypeAlias = dict[Any, tuple[Any, list[int | None]]]
"""By call: the results, and for each the operand whose memory it has."""


class FakeTensors:
    """A mode that makes fake tensors, the symbols of their sizes, and what operators have returned."""

    def __init__(self) -> None:
        self.environment = ShapeEnv(duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.environment, allow_non_fake_inputs=True)
        self.mode.cache_enabled = False  # its keys cost more than what is computed once
        symbols: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
        given = torch.empty((BATCH, LENGTH))
        made = self.mode.from_tensor(given, symbolic_context=symbols, source=ConstantSource("input"))
        self.sizes: Any = made.shape
        """The symbols of the number of sequences and of tokens."""
        self.results: Results = {}
        self._ranges = dict(self.environment.var_to_range)

    def hold_for_all_sizes(self) -> bool:
        """Whether no operator and no code has asked how large a size is, or made a new symbol."""
        found = self.environment
        learnt = found.guards, found.axioms, found.replacements, found.divisible
        return not any(learnt) and dict(found.var_to_range) == self._ranges


_UNUSED: dict[torch.dtype, list[FakeTensors]] = {}
"""What earlier captures left, by torch's default dtype at the time."""
_MOST_RESULTS = 10_000
"""A program has hundreds. So many take 30 MB."""


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeTensors]:
    """Lends fake tensors to one capture, with the results of operators in earlier ones.

    Only while nobody has asked how large the sizes are does a result hold for all of them, and in every
    capture. Fake tensors of which somebody has asked it are not lent again.
    """
    unused = _UNUSED.setdefault(torch.get_default_dtype(), [])
    with torch.inference_mode(False):
        try:
            fakes = unused.pop()
        except IndexError:  # not asked before, as another thread may take the last one
            fakes = FakeTensors()
        try:
            yield fakes
        finally:
            if fakes.hold_for_all_sizes() and len(fakes.results) < _MOST_RESULTS:
                unused.append(fakes)


class FakeCalls:
    """Results of operators on fake tensors; those of a call like an earlier one are copies of its results.

    A model's layers make the same calls. To copy a fake tensor takes 0.02 ms, and to compute its symbolic
    sizes 0.4 to 7 ms. All tensors of a call must be kept, since they are known by their ids.

    Args:
        fakes: the fake tensors, whose results of earlier calls are used, and to which these are added.
    """

    def __init__(self, fakes: FakeTensors) -> None:
        self._mode, self._results = fakes.mode, fakes.results
        self._memory: dict[int, Any] = {}
        """By tensor: what tensors in the same memory have in common."""

    def share_memory(self, first: Tensor, second: Tensor) -> bool:
        """Whether a change of one tensor in place may change the other."""
        return bool(self._memory_of(first) == self._memory_of(second))

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what an operator returns."""
        if func._schema.is_mutable:
            return func(*args, **kwargs)
        numbers = _NUMBERS.get(func._schema.name.removeprefix(f"{NAME}::"), ())
        operands: list[Tensor] = []
        given = [item for place, item in enumerate(args) if place not in numbers]
        call = func, self._like(given, operands), self._like(tuple(kwargs.items()), operands)
        if call in self._results:
            known, sources = self._results[call]
            result = self._copied(known)
        else:
            result = _OWN_RESULTS.get(func, func)(*args, **kwargs)
            sources = [_source(tensor, operands) for tensor in _tensors(result)]
            # Operators of other packages may be defined anew.
            if func.namespace in ("aten", NAME) and not any(map(_has_value, (*operands, *_tensors(result)))):
                # A copy, as a later operator may change the result's own sizes.
                self._results[call] = self._copied(result), sources
        for tensor, source in zip(_tensors(result), sources, strict=True):
            self._memory[id(tensor)] = object() if source is None else self._memory_of(operands[source])
        return result

    def _copied(self, result: Any) -> Any:
        if isinstance(result, FakeTensor):
            return fast_detach(self._mode, result)
        if isinstance(result, (list, tuple)):
            return type(result)(self._copied(item) for item in result)
        return result

    def _memory_of(self, tensor: Tensor) -> Any:
        return self._memory.get(id(tensor), tensor.untyped_storage()._cdata)

    def _like(self, given: Any, operands: list[Tensor]) -> Any:
        """Returns what is equal for arguments of which an operator makes the same; notes the tensors."""
        if isinstance(given, Tensor):
            operands.append(given)
            if _has_value(given):
                return object()  # the result may depend on it
            sizes = (*given.shape, *given.stride(), given.storage_offset())
            flags = given.dtype, given.device, given.is_conj(), given.is_neg()
            return tuple(map(expression, sizes)), flags
        if isinstance(given, (list, tuple)):
            return type(given), tuple(self._like(item, operands) for item in given)
        return type(given), expression(given)


def _has_value(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) or tensor.constant is not None


def _tensors(result: Any) -> list[Tensor]:
    results = result if isinstance(result, (list, tuple)) else [result]
    return [item for item in results if isinstance(item, Tensor)]


def _source(tensor: Tensor, operands: list[Tensor]) -> int | None:
    """Returns which operand a tensor has the memory of."""
    memory = tensor.untyped_storage()._cdata
    found = (n for n, operand in enumerate(operands) if operand.untyped_storage()._cdata == memory)
    return next(found, None)


def _polar(size: Tensor, angle: Tensor) -> Tensor:
    """Returns the fake result of ``torch.polar``; torch's own one makes numbers of symbolic sizes."""
    if size.shape != angle.shape:
        raise NotRepresentedError("polar computes with tensors of several shapes")
    return angle.new_empty(angle.shape, dtype=torch.promote_types(angle.dtype, torch.complex64))


def _convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, *others: Any
) -> Tensor:
    """Returns the fake result of a convolution, whose sizes the matcher checks.

    torch's own one asks whether there are fewer than 16 sequences.
    """
    if (list(stride), list(dilation), list(others[:2])) != ([1], [1], [False, [0]]):
        raise NotRepresentedError("it has a convolution over something else than each token")
    return input.new_empty(
        (input.shape[0], weight.shape[0], input.shape[2] + 2 * padding[0] - weight.shape[2] + 1)
    )


_OWN_RESULTS = {torch.ops.aten.polar.default: _polar, torch.ops.aten.convolution.default: _convolution}


def shape_of(tensor: Tensor) -> tuple[Any, ...]:
    """Returns the sizes of a tensor: numbers and expressions."""
    return tuple(map(expression, tensor.shape))


def expression(size: Any) -> Any:
    """Returns the expression of a symbolic size, or a number as it is."""
    return size.node.expr if isinstance(size, torch.SymInt) else size
