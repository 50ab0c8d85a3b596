"""The values of an expression on a CUDA machine, a host without accelerator, and another accelerator.

An edit of a test or of a device is right if two things hold. On a CUDA machine and on a host, the new text
has the same value as the old. On another accelerator, it has the value that the old text has on a CUDA
machine. This module evaluates both texts for every value of the names in them. It runs no code: an unknown
expression is a variable, with the same value in both texts.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class World:
    """A machine that a program may run on."""

    title: str
    device_type: str
    backend: str


CUDA = World("on a CUDA machine", "cuda", "nccl")
HOST = World("on a host without accelerator", "cpu", "gloo")
OTHER = World("on another accelerator", "other", "ccl")


def machine_with(kind: str) -> World:
    """A machine whose accelerator the program has its own code for: ``mps``."""
    return World(f"on {kind}", kind, "gloo" if kind == "mps" else "ccl")


@dataclass(frozen=True)
class Difference:
    """One case in which the new text does something else."""

    world: World
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.world.title} it is {self.new} and was {self.old}"


class TooComplexError(Exception):
    """An expression has more cases than can be looked at."""


_MOST_CASES = 400


def differences(
    old: str,
    new: str,
    names: Mapping[str, str],
    *,
    as_test: bool,
    kinds: tuple[str, ...] = (),
    host_autocasts: bool = False,
    false_on_host: frozenset[str] = frozenset(),
) -> list[Difference]:
    """The worlds in which a new expression differs from the old, with one case for each.

    Args:
        old: the text before the edits.
        new: the text after them.
        names: the full name of each imported name in either text: ``{"th": "torch"}``.
        as_test: whether only the truth of the value matters.
        kinds: device types that the program has its own code for, which must keep their branches.
        host_autocasts: whether the program may turn on the autocast of the CPU around the expression.
        false_on_host: names and attributes in both texts that are false without accelerator.

    Raises:
        TooComplexError: there are too many cases.
        SyntaxError: this Python cannot parse a text.
    """
    try:
        before, after = _parsed(old), _parsed(new)
        return _differences(before, after, names, as_test, kinds, host_autocasts, false_on_host)
    except RecursionError:
        raise TooComplexError from None


def _differences(
    before: ast.expr,
    after: ast.expr,
    names: Mapping[str, str],
    as_test: bool,
    kinds: tuple[str, ...],
    host_autocasts: bool,
    false_on_host: frozenset[str],
) -> list[Difference]:
    asks_for_missing = _asks_whether_there_is_cuda(before, names)
    texts: dict[int, str] = {}
    found: list[Difference] = []
    worlds = [(CUDA, CUDA), (HOST, HOST), (CUDA, OTHER)]
    worlds += [(machine, machine) for machine in map(machine_with, kinds)]
    for first, second in worlds:

        def case(choices: _Choices, first: World = first, second: World = second) -> tuple[Any, Any]:
            values = []
            for tree, world in ((before, first), (after, second)):
                evaluator = _Evaluator(
                    *(world, names, choices, asks_for_missing, host_autocasts, false_on_host),
                    *(second is OTHER, texts),
                )
                try:
                    value = evaluator.value(tree)
                    values.append(evaluator.truth(value) if as_test else _renamed(value, world))
                except _RaisesError:
                    values.append(_RAISES)
            return values[0], values[1]

        for left, right in _cases(case):
            if second is HOST and _is_unusable(left, right):
                continue
            if left is not _RAISES and not _alike(left, right):
                found.append(Difference(second, _shown(left), _shown(right)))
                break
    return found


def _parsed(text: str) -> ast.expr:
    return ast.parse(f"({text}\n)", mode="eval").body


def _asks_whether_there_is_cuda(tree: ast.expr, names: Mapping[str, str]) -> bool:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(_qualified(call.func, names) in _ASKS_FOR_CUDA for call in calls)


_ASKS_FOR_CUDA = {"torch.cuda.is_available", "torch.cuda.device_count"}

# -- values ----------------------------------------------------------------------------------------------


class _RaisesError(Exception):
    """The expression raises in this world."""


class _Raises:
    def __repr__(self) -> str:
        return "an error"


_RAISES = _Raises()


@dataclass(frozen=True)
class _Unknown:
    """A value that the text does not show."""

    text: str


@dataclass(frozen=True)
class _Effect:
    """What a call turns on or off."""

    text: str

    def __str__(self) -> str:
        return self.text


_AS_AROUND = _Effect("as the autocast of the CPU around it")


class _Choices:
    """The values of the variables in one case."""

    def __init__(self, given: Mapping[str, int]) -> None:
        self._given = given
        self.made: dict[str, tuple[int, int]] = {}

    def of(self, name: str, count: int) -> int:
        """Which of ``count`` values a variable has."""
        if name not in self.made:
            self.made[name] = (self._given.get(name, 0), count)
        return min(self.made[name][0], count - 1)


def _cases(case: Callable[[_Choices], tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """The results for every combination of the variables that the evaluation asks for."""
    waiting: list[dict[str, int]] = [{}]
    seen = 0
    while waiting:
        given = waiting.pop()
        choices = _Choices(given)
        yield case(choices)
        seen += 1
        if seen > _MOST_CASES:
            raise TooComplexError
        fixed = dict(given)
        for name, (index, count) in choices.made.items():
            if name not in given:
                waiting += [{**fixed, name: other} for other in range(1, count)]
                fixed[name] = index


def _alike(left: Any, right: Any) -> bool:
    """Whether two values are the same; two unknown ones may be."""
    if isinstance(left, _Unknown) or isinstance(right, _Unknown):
        return True
    return type(left) is type(right) and bool(left == right)


def _is_unusable(left: Any, right: Any) -> bool:
    """Whether a value is a CUDA device, which no host can use, and the new one is the host's."""
    are_devices = isinstance(left, str) and isinstance(right, str)
    return are_devices and left.startswith("cuda") and right.partition(":")[0] == "cpu"


def _renamed(value: Any, world: World) -> Any:
    """A value with the names of a CUDA machine for those of this one."""
    if isinstance(value, str) and world is OTHER:
        backends = {world.backend: CUDA.backend, CUDA.backend: "a backend of CUDA"}
        return backends.get(str(value)) or str(value).replace(world.device_type, "cuda")
    return str(value) if isinstance(value, str) else value


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


# -- evaluation ------------------------------------------------------------------------------------------

_OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.NotEq: ast.Eq, ast.NotIn: ast.In, ast.IsNot: ast.Is, ast.GtE: ast.Lt, ast.LtE: ast.Gt,
}  # fmt: skip
_COMPUTED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: a == b,
    ast.In: lambda a, b: a in b,
    ast.Is: lambda a, b: a is b,
    ast.Lt: lambda a, b: a < b,
    ast.Gt: lambda a, b: a > b,
}
_COUNTS = (1, 2, 8)
_NUMBERS = (1, 0, 2, 9)
_DEVICE_FIELDS = {"is_cuda": "cuda", "is_cpu": "cpu", "is_mps": "mps", "is_xpu": "xpu"}
_ANSWERS = ("is_bf16_supported", "is_initialized")
"""Questions that an accelerator answers either way; a CPU answers yes, and torch.cuda without CUDA no."""
_SAME_TEXT = {"lower", "strip", "casefold"}
_AMP_OF_CUDA = {"autocast": 0, "GradScaler": 4}
"""The position of ``enabled`` in ``torch.cuda.amp`` and in acclimate's ``amp``."""
_AMP_OF_TORCH = {"autocast": 2, "GradScaler": 5}
"""The position of ``enabled`` in ``torch.amp``, where the device type is first."""


@dataclass
class _Evaluator:
    """Evaluates one expression in one world, in one case."""

    world: World
    names: Mapping[str, str]
    choices: _Choices
    asks_for_missing: bool
    host_autocasts: bool = False
    false_on_host: frozenset[str] = frozenset()
    beside_other: bool = False
    """Whether the value is compared with that on another accelerator: what NVIDIA's GPUs did, it must do."""
    _texts: dict[int, str] = field(default_factory=dict)

    def value(self, node: ast.expr) -> Any:
        """The value of an expression."""
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        return self._unknown(node) if method is None else method(node)

    def truth(self, value: Any) -> bool:
        """Whether a value is true; of an unknown one, both are looked at."""
        if isinstance(value, _Unknown):
            is_false = self.world is HOST and value.text in self.false_on_host
            return not is_false and self._is(value.text)
        return bool(value)

    def _is(self, text: str) -> bool:
        return self.choices.of(text, 2) == 1

    def _unknown(self, node: ast.AST) -> _Unknown:
        return _Unknown(self._text(node))

    def _text(self, node: ast.AST) -> str:
        """The text of a part, with the names of a CUDA machine, so that it is the same before and after."""
        if id(node) not in self._texts:
            old_names = _OldNames(_Evaluator(CUDA, self.names, _Choices({}), self.asks_for_missing))
            if any(isinstance(part, ast.Call) and old_names.gives_name(part) for part in ast.walk(node)):
                node_of_cuda = old_names.visit(copy.deepcopy(node))
            else:
                node_of_cuda = node
            self._texts[id(node)] = ast.unparse(node_of_cuda)
        return self._texts[id(node)]

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _tuple(self, node: ast.Tuple) -> Any:
        return tuple(self.value(element) for element in node.elts)

    _list = _set = _tuple

    def _boolop(self, node: ast.BoolOp) -> Any:
        value: Any = None
        for operand in node.values:
            value = self.value(operand)
            truth = self.truth(value)
            if truth != isinstance(node.op, ast.And):
                return value
        return value

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        return not self.truth(value) if isinstance(node.op, ast.Not) else self._unknown(node)

    def _ifexp(self, node: ast.IfExp) -> Any:
        return self.value(node.body if self.truth(self.value(node.test)) else node.orelse)

    def _joinedstr(self, node: ast.JoinedStr) -> Any:
        parts = [
            self.value(part.value) if isinstance(part, ast.FormattedValue) else self.value(part)
            for part in node.values
        ]
        if not parts or not isinstance(parts[0], str):
            return self._unknown(node)
        return "".join("n" if isinstance(part, _Unknown) else str(part) for part in parts)

    def _binop(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, str) and isinstance(right, str):
            return left + right
        return self._unknown(node)

    def _attribute(self, node: ast.Attribute) -> Any:
        if (name := _qualified(node, self.names)) is not None:
            return self._global(name, node)
        if node.attr in _DEVICE_FIELDS:
            return self._type(f"{self._text(node.value)}.device") == _DEVICE_FIELDS[node.attr]
        if node.attr == "type":
            held = self.value(node.value)
            if isinstance(held, str):
                return held.partition(":")[0]
        return self._unknown(node)

    def _global(self, name: str, node: ast.expr) -> Any:
        if name == "torch.version.hip" and self.beside_other:
            return None  # ROCm's machines are compared with themselves, as CUDA's
        if name in ("torch.version.cuda", "torch.version.hip"):
            return self._unknown(node) if self.world is CUDA else None
        if name == "torch.distributed.Backend.NCCL":
            return "nccl"
        return self._unknown(node)

    def _type(self, name: str) -> str:
        return self._device(name).partition(":")[0]

    def _device(self, name: str) -> str:
        """The value of a variable that holds a device: the CPU, the accelerator, or one of several."""
        devices = ["cpu", self.world.device_type, f"{self.world.device_type}:1"]
        if self.world is HOST:
            # A program may be told to use CUDA where there is none, and look for it itself.
            devices = ["cpu", "cuda", "cuda:1"] if self.asks_for_missing else ["cpu"]
        return devices[self.choices.of(f"device {name}", 3) % len(devices)]

    def _backend(self, name: str) -> str:
        return (self.world.backend, "gloo")[self.choices.of(f"backend {name}", 2)]

    # -- comparisons -------------------------------------------------------------------------------------

    def _compare(self, node: ast.Compare) -> Any:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            if not self._compared(left, operator, right):
                return False
            left = right
        return True

    def _compared(self, left_node: ast.expr, operator: ast.cmpop, right_node: ast.expr) -> bool:
        kind = _OPPOSITES.get(type(operator), type(operator))
        left, right = self.value(left_node), self.value(right_node)
        left, right = self._as_device(left, right), self._as_device(right, left)
        if isinstance(left, _Unknown) and left.text.endswith(".type()"):
            named = right if isinstance(right, tuple) else (right,)
            result = any(self._is_class(left.text, str(name)) for name in named)
        elif (numbers := self._numbers(left, kind, right)) is not None:
            result = _COMPUTED[kind](*numbers)
        elif isinstance(left, _Unknown) or isinstance(right, _Unknown):
            texts = (self._named(left, left_node), self._named(right, right_node))
            result = self._is(f"{texts[0]} {kind.__name__} {texts[1]}")
        else:
            try:
                result = _COMPUTED[kind](left, right)
            except TypeError as error:
                raise _RaisesError from error
        return result != (type(operator) in _OPPOSITES)

    def _numbers(self, left: Any, kind: type[ast.cmpop], right: Any) -> tuple[int, int] | None:
        """An unknown value and the number beside it, as two numbers: ``n <= device_count()``."""
        sides = (left, right)
        known = [side for side in sides if type(side) is int]
        if len(known) != 1 or kind not in (ast.Lt, ast.Gt, ast.Eq):
            return None
        if not all(isinstance(side, _Unknown) or type(side) is int for side in sides):
            return None
        found = [
            side if type(side) is int else _NUMBERS[self.choices.of(f"number {side.text}", len(_NUMBERS))]
            for side in sides
        ]
        return found[0], found[1]

    def _is_class(self, tensor: str, name: str) -> bool:
        """Whether a tensor has a class such as ``"torch.cuda.HalfTensor"``, whose name holds the device."""
        *_, device_type, last = name.split(".")
        is_here = device_type == self.world.device_type and self.world is not HOST
        return is_here and self._is(f"{tensor} is {last}")

    def _named(self, value: Any, node: ast.expr) -> str:
        return self._text(node) if isinstance(value, _Unknown) else repr(value)

    def _as_device(self, value: Any, beside: Any) -> Any:
        """An unknown value that is compared with a device's or a backend's name, as such a variable."""
        if not isinstance(value, _Unknown):
            return value
        said = beside[0] if isinstance(beside, tuple) and beside else beside
        if not isinstance(said, str):
            return value
        if value.text.endswith(".type"):
            return self._type(value.text.removesuffix(".type")) if _is_device(said, self.world) else value
        if _is_device(said, self.world):
            return self._device(value.text)
        return self._backend(value.text) if said in ("nccl", "gloo", self.world.backend) else value

    # -- calls -------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> Any:
        name = _qualified(node.func, self.names)
        if name is not None:
            return self._of_function(name, node)
        if isinstance(node.func, ast.Attribute):
            return self._of_method(node.func, node)
        if isinstance(node.func, ast.Name) and node.args:
            if node.func.id == "str":
                return self.value(node.args[0])
            if node.func.id == "bool":
                return self.truth(self.value(node.args[0]))
            if node.func.id in ("max", "min", "int"):
                values = [self.value(argument) for argument in node.args]
                if all(isinstance(value, int) for value in values):
                    return {"max": max, "min": min, "int": max}[node.func.id](values)
        if isinstance(node.func, ast.Call) and len(node.func.args) == 3:
            return self._of_module(node.func)
        return self._unknown(node)

    # -- mixed precision ---------------------------------------------------------------------------------

    def _of_amp(self, kind: str, device: Any, enabled: int, node: ast.Call) -> Any:
        """Whether an autocast or a scaler is on; torch turns those of CUDA off where there is none."""
        given = next((said.value for said in node.keywords if said.arg == "enabled"), None)
        if given is None and enabled < len(node.args):
            given = node.args[enabled]
        is_unclear = any(said.arg is None for said in node.keywords) or any(
            isinstance(argument, ast.Starred) for argument in node.args
        )
        if not isinstance(device, str) or (given is None and is_unclear):
            return self._unknown(node)
        asked = True if given is None else self.value(given)
        if asked == _AS_AROUND:
            return _Effect("off")
        is_asked = self.truth(asked)
        is_cpus = device == "cpu"
        if device == "cuda" and self.world is not CUDA:
            is_asked = False
        if is_asked or not self.host_autocasts or self.world is not HOST or kind != "autocast":
            return _Effect("on" if is_asked else "off")
        return _Effect("off inside an autocast of the CPU too") if is_cpus else _Effect("off")

    def _of_module(self, getter: ast.Call) -> Any:
        """``getattr(torch.get_device_module(…), "is_bf16_supported", lambda: True)()``."""
        if isinstance(getter.func, ast.Name) and getter.func.id == "getattr":
            said = self.value(getter.args[1])
            if said in _ANSWERS:
                return self._answer(said, True)
        return self._unknown(getter)

    def _answer(self, question: str, on_host: Any) -> Any:
        """The answer that an accelerator gives, the same variable on CUDA and on others."""
        return on_host if self.world is HOST else self._is(question)

    def _count(self) -> int:
        return _COUNTS[self.choices.of("devices", len(_COUNTS))]

    def _of_function(self, name: str, node: ast.Call) -> Any:
        has_cuda = self.world is CUDA
        last = name.rpartition(".")[2]
        if name.startswith("torch.cuda.amp.") and last in _AMP_OF_CUDA:
            return self._of_amp(last, "cuda", _AMP_OF_CUDA[last], node)
        if (name == "torch.autocast" or name.startswith("torch.amp.")) and last in _AMP_OF_TORCH:
            return self._of_amp(last, self._amp_device(node), _AMP_OF_TORCH[last], node)
        if name.startswith("torch.cuda."):
            if name == "torch.cuda.is_available":
                return has_cuda
            if name == "torch.cuda.device_count":
                return self._count() if has_cuda else 0
            if last in _ANSWERS:
                return has_cuda and self._is(last)
            if name == "torch.cuda.memory_allocated":
                return _Unknown(f"{self.world.title} {name}")
            if not has_cuda:
                raise _RaisesError
            return _Unknown(name)
        if name == "torch.accelerator.is_available":
            return self.world is not HOST
        if name == "torch.accelerator.device_count":
            return 0 if self.world is HOST else self._count()
        if name == "accelerator_type":
            return self.world.device_type
        if name == "torch.is_autocast_enabled" and [ast.unparse(one) for one in node.args] == ["'cpu'"]:
            return _AS_AROUND
        if name == "torch.device" and node.args:
            device = self.value(node.args[0])
            return device if len(node.args) == 1 or not isinstance(device, str) else f"{device}:n"
        if name == "torch.distributed.get_default_backend_for_device":
            return self.world.backend
        if name in ("torch.distributed.is_nccl_available", "torch.distributed.is_backend_available"):
            return self._answer("has backend", name.endswith("backend_available"))
        return self._unknown(node)

    def _amp_device(self, node: ast.Call) -> Any:
        """The device type given to ``torch.autocast``; a scaler's default is CUDA."""
        given = next((said.value for said in node.keywords if said.arg in ("device_type", "device")), None)
        given = given or (node.args[0] if node.args else None)
        if given is None:
            return "cuda"
        value = self.value(given)
        return self._device(value.text) if isinstance(value, _Unknown) else value

    def _of_method(self, function: ast.Attribute, node: ast.Call) -> Any:
        owner = function.value
        if function.attr in _AMP_OF_CUDA and isinstance(owner, ast.Attribute) and owner.attr == "amp":
            held = owner.value
            if isinstance(held, ast.Call) and _qualified(held.func, self.names) == "get_accelerator":
                index = _AMP_OF_CUDA[function.attr]
                return self._of_amp(function.attr, self.world.device_type, index, node)
        called = _qualified(owner.func, self.names) if isinstance(owner, ast.Call) else None
        if called == "get_accelerator":
            return self._of_accelerator(function.attr, node)
        if called == "torch.get_device_module":
            if function.attr == "is_available":
                return True
            if function.attr == "device_count":
                return 1 if self.world is HOST else self._count()
            if function.attr in _ANSWERS:
                return self._answer(function.attr, True)
        if function.attr in ("startswith", "split", *_SAME_TEXT):
            return self._of_text(function, node)
        return self._unknown(node)

    def _of_accelerator(self, method: str, node: ast.Call) -> Any:
        if method == "device_name":
            bare = not node.args or self.world is HOST
            return self.world.device_type if bare else f"{self.world.device_type}:{self._index(node.args[0])}"
        if method == "current_device_name":
            return "cpu" if self.world is HOST else f"{self.world.device_type}:n"
        if method == "current_device":
            return _Unknown("torch.cuda.current_device")
        if method == "is_available":
            return True
        if method == "device_count":
            return self._count()
        if method in _ANSWERS:
            return self._answer(method, True)
        if method == "communication_backend_name":
            return self.world.backend
        if method == "on_accelerator" and node.args:
            return self._type(f"{self._text(node.args[0])}.device") == self.world.device_type
        return self._unknown(node)

    def _index(self, node: ast.expr) -> str:
        value = self.value(node)
        return str(value) if isinstance(value, int) else "n"

    def _of_text(self, function: ast.Attribute, node: ast.Call) -> Any:
        held = self.value(function.value)
        said = self.value(node.args[0]) if node.args else None
        if isinstance(said, tuple):
            said = said[0] if said else None
        starts = said if isinstance(said, str) and function.attr == "startswith" else ""
        if isinstance(held, _Unknown) and _is_device(starts.rstrip(":"), self.world):
            held = self._device(held.text)
        if isinstance(held, str) and function.attr in _SAME_TEXT:
            return held
        if isinstance(held, str) and isinstance(said, str):
            if function.attr == "startswith":
                whole = self.value(node.args[0])
                return held.startswith(whole)
            return tuple(held.split(said))
        return self._unknown(node)


class _OldNames(ast.NodeTransformer):
    """Replaces calls for the names of devices and backends by these names."""

    def __init__(self, evaluator: _Evaluator) -> None:
        self._evaluator = evaluator

    def gives_name(self, node: ast.Call) -> bool:
        """Whether a call is of a function that gives the name of a device or a backend."""
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        asked = owner.func if isinstance(owner, ast.Call) else node.func
        return _qualified(asked, self._evaluator.names) in _GIVE_NAMES

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A constant for a call that gives a name."""
        if self.gives_name(node):
            value = self._evaluator.value(node)
            if isinstance(value, str):
                return ast.Constant(value)
        return self.generic_visit(node)


_GIVE_NAMES = {"get_accelerator", "accelerator_type", "torch.distributed.get_default_backend_for_device"}


def _is_device(text: str, world: World) -> bool:
    return text.partition(":")[0] in ("cuda", "cpu", "mps", "xpu", world.device_type)


def _qualified(node: ast.expr, names: Mapping[str, str]) -> str | None:
    """The full name of a name or a chain of attributes, if its first name is imported."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    return ".".join((names[node.id], *reversed(parts)))
