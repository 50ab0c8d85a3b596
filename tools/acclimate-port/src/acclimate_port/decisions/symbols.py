"""How code names what other files define or read: functions, parameters, attributes, names of modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

import libcst as cst
from libcst.metadata import GlobalScope

from acclimate_port.conditions.branches import is_field
from acclimate_port.dataflow.uses import KEEP_NAME, SETTINGS, class_around
from acclimate_port.source.outline import NO_PROJECT, Outline
from acclimate_port.source.saved_files import SavedFiles
from acclimate_port.source.tree import called_name, dotted, last_name, string_value
from acclimate_port.source_file import SourceFile, kept

CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
MODULE = "<module>"
"""The name of the code of a module that is in no function or class."""
_MOST = 40
"""The most expressions that are looked at for where one value comes from."""
_DEEPEST = 5
"""The most entries of entries that are looked at for what holds a setting."""
_GIVE_DEFAULT = ("get", "getattr", "pop")


class Kind(Enum):
    """What several places have in common."""

    __hash__ = object.__hash__  # of the one object of each kind; that of `Enum` takes a fiftieth of all time

    FLAG = "flag"
    """A value that says whether there is CUDA."""
    DEVICE = "device"
    """A device, or a communication backend."""
    TENSOR = "tensor"
    """A tensor whose device is asked for."""
    NUMBER = "number"
    """A function that gives devices their numbers."""
    CODE = "code"
    """A function that runs."""
    PLACE = "place"
    """A function, class or name of a module whose code chooses a device, asks for one or moves to it."""
    CAST = "cast"
    """One whose code turns an autocast or a scaler on."""
    STREAM = "stream"
    """One whose code makes, enters or waits for a stream, or captures a graph."""
    FIGURE = "figure"
    """One whose code reads or resets a figure of memory."""
    STATE = "state"
    """One whose code reads or restores the state of random numbers."""
    BACKEND = "backend"
    """The communication backend of a program, and the devices of the tensors that its ranks exchange."""
    REPORT = "report"
    """What a file tells of the device: in a message, a check or a result."""
    WIDE = "wide"
    """One whose code brings numbers of 64 bits to the device, or takes the device where there may be none."""
    GROUP = "group"
    """One whose code gives tensors to torch's process groups, or takes the device where there may be none."""
    KERNEL = "kernel"
    """One whose code calls what Apple's GPUs have no kernel for, or takes the device in place of the host."""
    BOUND = "bound"
    """One whose code gives tensors of the device to what takes them from CUDA alone, or takes the device."""
    UNKNOWN = "unknown"
    """One whose code runs code that is not known to follow torch's devices, or takes the device."""
    LOAD = "load"
    """A file whose code loads a checkpoint to the device that it was saved on."""
    IMPORT = "import"
    """A file that cannot be imported without CUDA."""
    BUILD = "build"
    """A function that runs NVIDIA's tools, and raises where there are none."""
    SPLIT = "split"
    """Code that reads the devices which `torch.nn.DataParallel` splits a batch over."""
    FLOAT64 = "float64"
    """A number of 64 bits that a function gets."""
    SENT = "sent"
    """An object that holds tensors of the device, and a parameter that gets one."""
    ANSWER = "answer"
    """A function that asks for CUDA, and whose result may say so."""
    USE = "use"
    """A function or class that chooses a device, which code of the project may use."""
    TEST = "test"
    """Tests that a guard in another file skips: see guarded_tests.py."""


TOGETHER = (
    *(Kind.PLACE, Kind.CAST, Kind.STREAM, Kind.FIGURE, Kind.STATE, Kind.WIDE, Kind.GROUP, Kind.KERNEL),
    *(Kind.BOUND, Kind.UNKNOWN),
)
"""What stays or is ported together in each file and in what it imports."""


class Symbol(NamedTuple):
    """A name that several files share, as one file writes it.

    The text begins with how the name is found: ``here:f`` is the file's own, ``from:pkg.mod.f`` is imported,
    ``self:Class.f`` belongs to an object of a class of the file, ``of:`` to one of an imported class, and
    ``any:f`` to an object of unknown class, or to options and settings. ``(name)`` and ``(#1)`` at its end
    are parameters.
    """

    kind: Kind
    text: str


@dataclass(frozen=True)
class Facts:
    """What the other files of a project must know of one."""

    outline: Outline = field(default_factory=Outline)
    relies: frozenset[Symbol] = frozenset()
    """What safe edits are right with only if it is ported everywhere."""
    stays: dict[Symbol, int] = field(default_factory=dict)
    """What is read or decided by code that stays, and the line of that code."""
    implies: tuple[tuple[Symbol, Symbol], ...] = ()
    """Pairs of symbols: if the first stays, so does the second."""
    files: SavedFiles = field(default_factory=SavedFiles)
    """The checkpoints that it loads and saves."""

    def after(self, first: Facts) -> Facts:
        """The facts of a later run over the same file, which finds no longer what the first one edited."""
        stays = {symbol: first.stays.get(symbol, line) for symbol, line in self.stays.items()}
        implies = tuple(dict.fromkeys((*self.implies, *first.implies)))
        return replace(first, stays=stays, relies=self.relies | first.relies, implies=implies)


def reference(file: SourceFile, node: cst.CSTNode) -> str:
    """The text of a symbol for a name or an attribute; ``""`` if it is a local name or another package's."""
    full = file.tree.qualified(node)
    if full is not None:
        return "" if NO_PROJECT.match(full) else f"from:{full}"
    if isinstance(node, cst.Name):
        if _is_of_module(file, node):
            return f"here:{node.value}"
        # A name that nothing binds may come from `from settings import *`.
        return f"star:{node.value}" if has_star(file) and not file.tree.assignments(node) else ""
    if not isinstance(node, cst.Attribute):
        return ""
    if dotted(node.value) in ("self", "cls"):
        owner = class_around(file, node)
        return f"self:{owner.name.value}.{node.attr.value}" if owner is not None else ""
    owner_text = _class_of(file, node.value)
    return f"of:{owner_text}.{node.attr.value}" if owner_text else f"any:{node.attr.value}"


@kept
def has_star(file: SourceFile) -> bool:
    """Whether the file imports all names of a module."""
    return any(isinstance(one.names, cst.ImportStar) for one in file.tree.imports)


def options(file: SourceFile, node: cst.CSTNode) -> list[str]:
    """The texts of the symbols of an option or setting: of what reads it, or of what gives it a value.

    ``args.device``, ``opt["device"]``, ``cfg.get("device")``; ``add_argument("--device", default=…)``,
    ``settings = {"device": …}`` and ``Namespace(device=…)``.
    """
    owner, names, at = None, [], file.tree.parent(node)
    if isinstance(node, (cst.Attribute, cst.Subscript)):
        owner, names = node.value, [last_name(node)]
    elif isinstance(node, cst.Call) and called_name(node) in _GIVE_DEFAULT and node.args:
        is_plain = isinstance(node.func, cst.Name) and len(node.args) > 1
        owner = node.args[0].value if is_plain else getattr(node.func, "value", None)
        names = [string_value(node.args[is_plain].value) or ""]
    elif isinstance(node, cst.Arg) and isinstance(at, cst.Call):
        word = node.keyword.value if node.keyword is not None else ""
        if called_name(at) == "add_argument" and word in ("default", "const"):
            return [f"any:{name}" for name, calls in file.options.items() if at in calls]
        owner, names = at.func, [word]
    elif isinstance(node, cst.DictElement):
        names = [string_value(node.key) or ""]
        while isinstance(at, (cst.Dict, cst.DictElement)):
            at = file.tree.parent(at)
        owner = at.targets[0].target if isinstance(at, cst.Assign) else getattr(at, "target", None)
    return [f"any:{name}" for name in names if name and is_settings(owner)]


def is_settings(node: cst.CSTNode | None) -> bool:
    """Whether a value, or the class or function that makes one, holds options by its name: ``vars(args)``."""
    for _ in range(_DEEPEST):
        if isinstance(node, cst.Call):
            node = node.args[0].value if called_name(node) in ("vars", "asdict") and node.args else node.func
        node = node.value if isinstance(node, cst.Subscript) else node
    return node is not None and SETTINGS.search(last_name(node)) is not None


def _class_of(file: SourceFile, node: cst.CSTNode) -> str:
    """The class of an object: of ``Classifier()``, also through a name that gets nothing else."""
    if isinstance(node, cst.Name):
        values = file.bound_values(node)
        node = values[0] if len(values) == 1 and values[0] is not None else node
    if not isinstance(node, cst.Call):
        return ""
    is_named = isinstance(node.func, cst.Name) or file.tree.qualified(node.func) is not None
    return reference(file, node.func) if is_named else ""


def _is_of_module(file: SourceFile, name: cst.Name) -> bool:
    bound = file.tree.assignments(name)
    return bool(bound) and isinstance(bound[0].scope, GlobalScope)


def of_function(file: SourceFile, function: cst.FunctionDef) -> str:
    """The text of the symbol of a function or method; for a constructor, its class."""
    owner = file.tree.around(function, cst.ClassDef)
    inner = file.tree.function(function)
    if inner is not None:
        return ""
    if owner is None:
        return f"here:{function.name.value}"
    name = owner.name.value
    return f"here:{name}" if function.name.value in CONSTRUCTORS else f"self:{name}.{function.name.value}"


def of_parameter(file: SourceFile, parameter: cst.Param) -> list[str]:
    """The texts of the symbols of a parameter: by its name, and by its position."""
    function = file.tree.around(parameter, cst.FunctionDef)
    text = of_function(file, function) if function is not None else ""
    if function is None or not text:
        return []
    listed = [*function.params.posonly_params, *function.params.params]
    is_static = any(dotted(one.decorator) == "staticmethod" for one in function.decorators)
    is_bound = file.tree.around(function, cst.ClassDef) is not None and not is_static
    found = [f"{text}({parameter.name.value})"]
    found += [f"{text}(#{index - is_bound})" for index, one in enumerate(listed) if one is parameter]
    return found


def of_argument(file: SourceFile, argument: cst.Arg) -> str:
    """The text of the symbol of the parameter that gets an argument; ``""`` if its function is unknown."""
    given = file.tree.given_to(argument)
    if given is None or argument.star or not isinstance(given.call.func, (cst.Name, cst.Attribute)):
        return ""
    text = reference(file, given.call.func)
    if not text or text.startswith("any:") or (not given.word and given.index is None):
        return ""
    return f"{text}({given.word or f'#{given.index}'})"


def sources(file: SourceFile, value: cst.CSTNode) -> list[str]:
    """The texts of the symbols that a value comes from: parameters, results of functions, attributes."""
    found: list[str] = []
    waiting, seen = [value], {id(value)}
    while waiting:
        texts, following = _source(file, waiting.pop())
        found += texts
        for node in following:
            if id(node) not in seen and len(seen) < _MOST:
                seen.add(id(node))
                waiting.append(node)
    return [text for text in dict.fromkeys(found) if text]


def known(file: SourceFile, node: cst.CSTNode) -> list[str]:
    """The texts of the symbols of a name, an attribute or an option, but not of any object's attribute."""
    text = reference(file, node)
    return [text] if text and not text.startswith("any:") else options(file, node)


def _source(file: SourceFile, node: cst.CSTNode) -> tuple[list[str], Iterable[cst.CSTNode]]:
    """The symbols of one expression, and the expressions that it gets its value from."""
    if isinstance(node, cst.Name):
        is_free = has_star(file) and not file.tree.assignments(node)
        if file.tree.qualified(node) is not None or _is_of_module(file, node) or is_free:
            return known(file, node), []
        bound = [one.node for one in file.tree.assignments(node)]
        texts = [text for one in bound if isinstance(one, cst.Param) for text in of_parameter(file, one)]
        return texts, [one for one in file.bound_values(node) if one is not None]
    if isinstance(node, cst.Attribute):
        if node.attr.value == "type":
            return [], [node.value]
        held = file.values.given_to_attributes.get(dotted(node), []) if dotted(node.value) == "self" else []
        return known(file, node), filter(None, held)
    if isinstance(node, cst.Call):
        name, receiver = called_name(node), node.func
        given = [one.value for one in node.args]
        if file.tree.qualified(node.func) == "torch.device" or (name == "str" and given):
            return [], given[:1]
        if isinstance(receiver, cst.Attribute) and name in KEEP_NAME:
            return [], [receiver.value]
        if name in _GIVE_DEFAULT and len(given) > 1:
            return options(file, node), given[-1:]
        returned = (one.value for one in file.returns(node))
        return options(file, node) or known(file, receiver), filter(None, returned)
    if isinstance(node, cst.IfExp):
        return [], [node.body, node.orelse]
    if isinstance(node, cst.BooleanOperation):
        return [], [node.left, node.right]
    if isinstance(node, cst.Subscript):
        return options(file, node), [node.value]
    return [], [node.value] if isinstance(node, cst.NamedExpr) else []


def holder_text(file: SourceFile, holder: cst.CSTNode) -> list[str]:
    """The texts of the symbols of what holds a value: a name, an attribute, a function or an argument."""
    if isinstance(holder, cst.Arg):
        return [of_argument(file, holder), *options(file, holder)]
    if isinstance(holder, cst.Name):
        function = file.tree.parent(holder)
        if isinstance(function, cst.FunctionDef) and function.name is holder:
            return [of_function(file, function)]
        owner = class_around(file, holder) if is_field(file, holder) else None
        if owner is not None:
            return [f"self:{owner.name.value}.{holder.value}", f"any:{holder.value}"]
        return [reference(file, holder), *options(file, holder)]
    if isinstance(holder, cst.Attribute):
        text = reference(file, holder)
        return [text] if text.startswith("from:") else [text, f"any:{last_name(holder)}"]
    return options(file, holder)
