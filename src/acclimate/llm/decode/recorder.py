"""Notes the operators that a thread runs on fake tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from acclimate.llm.decode.description import NotRepresentedError
from acclimate.llm.decode.elements import MOVES
from acclimate.llm.decode.fake_calls import FakeCalls, FakeTensors, shape_of
from acclimate.llm.decode.program import Role, Value
from acclimate.llm.decode.shadow_operators import NAME

_OVERWRITTEN = Value("overwritten", None, (), {}, 0, (), torch.float32, 0)
# Operators that return their argument's elements in order; where shape and dtype stay too, the argument.
_SAME = {
    "clone", "alias", "detach", "lift_fresh", "_to_copy", "view", "_unsafe_view", "reshape", "expand",
    "slice", "squeeze", "unsqueeze",
}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Notes each operator of this thread.

    Args:
        fakes: the fake tensors.
        origins: the model's tensors, by the identities of their fakes.
    """

    def __init__(self, fakes: FakeTensors, origins: dict[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.origins = origins
        self.values: dict[int, Value] = {}
        self.limit: int | None = None
        """The most tokens, with earlier ones, for which the operators are these; ``None``: any number."""
        self.replaced: list[Tensor] = []
        """Fakes of the model's buffers, of which the program has written all elements before it read any."""
        self.failure: Exception | None = None
        """Why an operator could not be noted, also if the model's code has caught the error."""
        self._kept: list[Tensor] = []
        self._computed: dict[Any, Value] = {}
        self._calls = FakeCalls(fakes)

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """The constants of one element."""
        found = (value.tensor for value in self.values.values())
        return tuple(tensor for tensor in found if tensor is not None and tensor.numel() == 1)

    def name(self, tensor: Tensor, value: Value) -> None:
        """Notes which value a tensor is."""
        self.values[id(tensor)] = value
        self._kept.append(tensor)  # else another tensor could get its id

    def value(self, tensor: Tensor) -> Value:
        """Returns the value that a tensor is; one that no operator made is a constant."""
        known = self.values.get(id(tensor))
        if known is _OVERWRITTEN:
            raise NotRepresentedError("a tensor is used after it was changed through another one")
        if known is None:
            origin = self.origins.get(id(tensor))
            if origin is None and not isinstance(tensor, FakeTensor):
                origin = tensor  # a tensor that a module keeps elsewhere than in its attributes
            if origin is None:
                raise NotRepresentedError("a tensor of unknown origin is used")
            if any(self._calls.share_memory(tensor, other) for other in self.replaced):
                raise NotRepresentedError("a tensor is used after it was changed through another one")
            known = Value(
                "constant", None, (), {}, 0, tuple(tensor.shape), tensor.dtype,
                Role.WEIGHTS if isinstance(origin, nn.Parameter) else 0, origin,
            )  # fmt: skip
            self.name(tensor, known)
        return known

    def _changed(self, op: str, args: tuple[Any, ...], result: Any) -> str:
        """Forgets what a change in place overwrites; returns the name of the operator without it."""
        target = args[0] if args else None
        own = None if target is None else self.values.get(id(target))
        if (
            target is None
            or own is None
            or result is not target
            or own.op in ("input", "constant")
            or not op.endswith("_")
        ):
            raise NotRepresentedError(f"{op} changes a tensor in place")
        # Other tensors in the same memory have other values from now on.
        for other in self._kept:
            if self._calls.share_memory(other, target):
                self.values[id(other)] = _OVERWRITTEN
        return op.removesuffix("_")

    def _is_written(self, target: Tensor, source: Any) -> bool:
        """Notes a write to a part of a tensor that the program has computed; returns whether it is such a
        part."""
        part = self.values.get(id(target))
        if part is None or part.op not in ("slice", "select"):
            return False
        if not isinstance(source, Value) or source.shape != part.shape or source.dtype != part.dtype:
            return False
        made: dict[int, Value] = {id(part): source}  # what the part, and the wholes that it is in, become
        while part.op in ("slice", "select"):
            if part.kwargs:
                return False
            whole = part.args[0]
            made[id(whole)] = _with_part(part, made[id(part)])
            part = whole
        if part.op in ("input", "constant"):
            return False
        for other in self._kept:
            if self._calls.share_memory(other, target):
                self.values[id(other)] = made.get(id(self.values[id(other)]), _OVERWRITTEN)
        return True

    def _is_replaced(self, target: Tensor, source: Tensor) -> bool:
        """Notes a write to all of a buffer of the model; returns whether it is one that was not read before.

        What the buffer held has no effect then: a module keeps there what it computes at each call.
        """
        origin = self.origins.get(id(target))
        value = self.value(source)
        if origin is None or isinstance(origin, nn.Parameter) or not _is_like(value, target):
            return False
        if any(self._calls.share_memory(other, target) for other in self._kept):
            return False
        self.name(target, value)
        self.replaced.append(target)
        return True

    def _is_true(self, value: Value) -> bool | None:
        """Returns what a condition on the largest position is for all texts up to a limit, which it notes.

        ``None``: it is no such condition. A text's positions are smaller than its number of tokens.
        """
        if value.op not in ("gt", "ge", "lt", "le") or type(value.args[1]) is not int:
            return None
        shift = _above_largest_position(value.args[0])
        if shift is None:
            return None
        limit = value.args[1] - shift + (value.op in ("gt", "le"))
        if limit < 2:
            return None
        self.limit = limit if self.limit is None else min(limit, self.limit)
        return value.op in ("lt", "le")

    def _convert(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            return self.value(given)
        if isinstance(given, torch.SymInt):
            return given.node.expr
        if isinstance(given, (torch.SymFloat, torch.SymBool)):
            raise NotRepresentedError("it computes with the number of tokens")
        if isinstance(given, (list, tuple)):
            return tuple(self._convert(item) for item in given)
        return given

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return self._noted(func, args, kwargs or {})
        except Exception as error:
            self.failure = self.failure or error
            raise

    def _noted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what an operator returns, and notes it."""
        if func is torch.ops.prim.device.default:  # it reads no elements
            return func(*args)
        op = _name_of(func)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotRepresentedError(f"{op} is random")
        if op in ("_local_scalar_dense", "where"):
            decided = self._is_true(self.value(args[0]))
            if decided is not None and op == "_local_scalar_dense":
                return decided
            chosen = None if decided is None else self._convert(args[1 if decided else 2])
            if isinstance(chosen, Value):
                result = self._calls.result(func, args, kwargs)
                if _is_like(chosen, result):
                    self.name(result, chosen)
                    return result
        if op == "copy_" and id(args[0]) not in self.values and self._is_replaced(*args[:2]):
            return func(*args, **kwargs)
        converted = tuple(self._convert(argument) for argument in args)
        named = {key: self._convert(argument) for key, argument in kwargs.items()}
        result = self._calls.result(func, args, kwargs)
        if op == "_local_scalar_dense" and not isinstance(result, (bool, int, float, complex)):
            raise NotRepresentedError("its code asks for the values of its inputs")
        results = result if isinstance(result, (list, tuple)) else [result]
        if func._schema.is_mutable:
            if op == "copy_" and result is args[0] and self._is_written(args[0], converted[1]):
                return result
            op = self._changed(op, args, result)
        op += _option_of(op, args, kwargs)
        if op in _SAME:
            source = converted[0]
            if _is_like(source, results[0]):
                self.name(results[0], source)
                return result
        roles = _joined((*converted, *named.values()))
        if op in ("past", "inputs", "kept_inputs", "state"):
            roles |= Role.CACHE
        for index, tensor in enumerate(results):
            if isinstance(tensor, Tensor):
                # The same operator on the same values is the same value.
                key = func, _exactly(converted), _exactly(tuple(named.items())), index
                if key not in self._computed:
                    made = Value(op, func, converted, named, index, shape_of(tensor), tensor.dtype, roles)
                    self._computed[key] = made
                self.name(tensor, self._computed[key])
        return result


def _with_part(part: Value, source: Value) -> Value:
    """Returns the tensor of which ``part`` is a part, with another value in its place."""
    whole, *where = part.args
    if part.op == "select" and whole.shape[where[0]] == 1:
        overload, args = torch.ops.aten.unsqueeze.default, (source, where[0])
        return Value("unsqueeze", overload, args, {}, 0, whole.shape, whole.dtype, source.roles)
    op = f"{part.op}_scatter"
    overload = getattr(torch.ops.aten, op).default
    roles = whole.roles | source.roles
    return Value(op, overload, (whole, source, *where), {}, 0, whole.shape, whole.dtype, roles)


def _is_like(value: Value, tensor: Tensor) -> bool:
    return value.dtype == tensor.dtype and value.shape == shape_of(tensor)


def _above_largest_position(value: Any) -> int | None:
    """Returns what is added to the largest position of a call; ``None``: the value is no such sum."""
    shift = 0
    while isinstance(value, Value) and value.op == "add" and type(value.args[1]) is int:
        value, shift = value.args[0], shift + value.args[1]
    if not isinstance(value, Value) or value.op != "max" or len(value.args) != 1:
        return None
    source = value.args[0]
    while source.op in MOVES:
        source = source.args[0]
    return shift if source.op == "input" and source.roles == Role.POSITIONS else None


def _name_of(func: Any) -> str:
    """Returns an operator's name without its overload, and without ``aten``; others keep their namespace."""
    whole: str = func._schema.name
    space, _, name = whole.partition("::")
    return name if space in ("aten", NAME) else whole


def _option_of(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns what a name must say of an option that makes the operator compute something else."""
    if op in ("add", "sub", "rsub") and (len(args) > 2 or kwargs.get("alpha", 1) != 1):
        return " with alpha"
    return " with a rounding mode" if op == "div" and kwargs.get("rounding_mode") is not None else ""


def _exactly(given: Any) -> Any:
    """Returns arguments with the types of numbers, as 1, 1.0 and True are equal."""
    if isinstance(given, tuple):
        return tuple(_exactly(item) for item in given)
    return given if isinstance(given, Value) else (type(given), given)


def _joined(given: Iterable[Any]) -> int:
    roles = 0
    for item in given:
        if isinstance(item, Value):
            roles |= item.roles
        elif isinstance(item, tuple):
            roles |= _joined(item)
    return roles


def input_value(tensor: Tensor, role: int) -> Value:
    """Returns the value of an input."""
    return Value("input", None, (), {}, 0, shape_of(tensor), tensor.dtype, role)
