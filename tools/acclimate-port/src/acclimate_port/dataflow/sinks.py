"""The sinks of a value: the calls and names that it reaches, which take a device or a number."""

from __future__ import annotations

from enum import Enum

import libcst as cst

from acclimate_port.dataflow.uses import DEVICE_KEYWORDS, parameter_of, reads_of, uses_of
from acclimate_port.source.tree import Given, entry_key, last_name, string_value, walk
from acclimate_port.source.values import DEVICE_NAME, Kind, guess_by_name
from acclimate_port.source_file import SourceFile, kept

DEVICE_METHODS = {"to", "cuda", "to_empty"}


class Sink(Enum):
    """The kind of value that a sink takes."""

    DEVICE = "device"
    NUMBER = "number"


@kept
def sink_of(file: SourceFile, node: cst.CSTNode) -> Sink:
    """The kind of value that an expression's sinks take; names, attributes and dictionaries are followed.

    It is a device only if every known sink takes a device.
    """
    waiting = [*uses_of(file, node, in_functions=False)]
    kinds: set[Sink | None] = set()
    defaults: set[int] = set()
    while waiting:
        use = waiting.pop()
        # What a call gives, such as `torch.device(index)`, is another value.
        if use is node or not isinstance(use, cst.Call):
            kinds.add(_sink(file, use))
        at = file.tree.parent(use)
        if isinstance(at, cst.Param) and id(at) not in defaults:
            defaults.add(id(at))
            reads = file.tree.reads(at.name)
            waiting += [one for read in reads for one in uses_of(file, read, in_functions=False)]
    return Sink.DEVICE if kinds - {None} == {Sink.DEVICE} else Sink.NUMBER


def holds_device_name(file: SourceFile, name: cst.Name) -> bool:
    """Whether a name holds a ``torch.cuda.current_device()`` that the port replaces with a device's name."""
    for assignment in file.tree.assignments(name):
        made = file.tree.value_of(assignment.node)
        for descendant in walk(made) if made is not None else ():
            if _asks_device(file, descendant):
                return sink_of(file, descendant) is Sink.DEVICE
    return False


def _sink(file: SourceFile, use: cst.CSTNode) -> Sink | None:
    """The kind of value that the code around a use takes; ``None`` if it only passes the value on."""
    at = file.tree.parent(use)
    if isinstance(use, cst.Arg):  # `**options`
        return Sink.DEVICE
    if isinstance(at, cst.Arg):
        given = file.tree.given_to(at)
        is_entry = given is not None and given.name == "dict" and not given.full and bool(given.word)
        return None if is_entry else Sink.DEVICE if given is not None and takes_device(given) else Sink.NUMBER
    if isinstance(at, cst.IfExp) and use is not at.test:
        return _beside(file, at.orelse if use is at.body else at.body)
    if isinstance(at, cst.BooleanOperation):
        return _beside(file, at.right if use is at.left else at.left)
    if isinstance(at, cst.Param):
        return Sink.NUMBER if file.values.of(at.name).kind is Kind.NUMBER else None
    if isinstance(at, cst.DictElement):
        return Sink.NUMBER if string_value(at.key) is None else None
    if isinstance(at, (cst.AnnAssign, cst.NamedExpr)):
        return _of_target(file, at.target)
    if isinstance(at, cst.Assign):
        return _of_target(file, at.targets[0].target) if len(at.targets) == 1 else Sink.NUMBER
    return None if _is_none(at) else Sink.NUMBER


def _beside(file: SourceFile, other: cst.BaseExpression) -> Sink | None:
    """Beside a number in a choice, a value is a number."""
    is_number = file.values.of(other).kind is Kind.NUMBER and not _asks_device(file, other)
    return Sink.NUMBER if is_number else None


def _of_target(file: SourceFile, target: cst.CSTNode) -> Sink | None:
    if isinstance(target, cst.Subscript):
        return None if entry_key(target) is not None else Sink.NUMBER
    kind = guess_by_name(last_name(target)).kind
    if not isinstance(target, (cst.Name, cst.Attribute)) or kind is Kind.NUMBER:
        return Sink.NUMBER
    is_unread = isinstance(target, cst.Attribute) and not any(reads_of(file, target))
    return Sink.DEVICE if is_unread and kind is Kind.DEVICE else None


def _asks_device(file: SourceFile, node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Call) and file.tree.qualified(node.func) == "torch.cuda.current_device"


def _is_none(at: cst.CSTNode | None) -> bool:
    """Whether a value is only compared with ``None``."""
    if not isinstance(at, cst.Comparison) or len(at.comparisons) != 1:
        return False
    return isinstance(at.comparisons[0].operator, (cst.Is, cst.IsNot))


def takes_device(given: Given) -> bool:
    """Whether an argument of a torch function is a device."""
    if given.word:
        # The functions of torch.cuda take device numbers as well as devices.
        return given.word in DEVICE_KEYWORDS and not given.full.startswith("torch.cuda.")
    if given.full == "torch.device":
        return given.index == 0 and len(given.call.args) == 1
    if given.full:
        return given.full == "torch.load" and given.index == 1
    is_method = isinstance(given.call.func, cst.Attribute) and given.name in DEVICE_METHODS
    return is_method and given.index == 0


@kept
def gets_to_device(file: SourceFile, parameter: cst.Param, depth: int = 3) -> bool:
    """Whether a parameter is a device: by its name, or because its function passes it on as a device."""
    if DEVICE_NAME.search(parameter.name.value):
        return True
    for use in file.tree.reads(parameter.name) if depth else []:
        given = file.tree.given_to(use)
        following = parameter_of(file, given)
        if given is not None and takes_device(given):
            return True
        if following is not None and gets_to_device(file, following, depth - 1):
            return True
    return False
