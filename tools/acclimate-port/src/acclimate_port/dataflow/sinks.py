"""The sinks of a value: the calls and names that it reaches, which take a device or a number."""

from __future__ import annotations

from enum import Enum

import libcst as cst

from acclimate_port.source.tree import Given, dotted, entry_key, last_name, string_value, walk
from acclimate_port.source.values import DEVICE_NAME, Kind, guess_by_name
from acclimate_port.source_file import SourceFile, kept

DEVICE_KEYWORDS = {"device", "map_location", "torch_device"}
DEVICE_METHODS = {"to", "cuda", "to_empty"}


class Sink(Enum):
    """The kind of value that a sink takes."""

    DEVICE = "device"
    NUMBER = "number"


def sink_of(file: SourceFile, node: cst.CSTNode) -> Sink:
    """The kind of value that an expression's sinks take; names, attributes and dictionaries are followed.

    It is a device only if every known sink takes a device.
    """
    if node not in file.goes_to_device:
        file.goes_to_device[node] = _SinkFinder(file).of(node) == {Sink.DEVICE}
    return Sink.DEVICE if file.goes_to_device[node] else Sink.NUMBER


def holds_device_name(file: SourceFile, name: cst.Name) -> bool:
    """Whether a name holds a ``torch.cuda.current_device()`` that the port replaces with a device's name."""
    for assignment in file.tree.assignments(name):
        made = file.tree.value_of(assignment.node)
        for descendant in walk(made) if made is not None else ():
            if _asks_device(file, descendant):
                return sink_of(file, descendant) is Sink.DEVICE
    return False


class _SinkFinder:
    """Finds the sinks of a value.

    Args:
        file: the file.
    """

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._seen: set[cst.CSTNode] = set()

    def of(self, node: cst.CSTNode) -> set[Sink]:
        """The kinds that an expression's sinks take; empty if no sink shows its kind."""
        if node in self._seen:
            return set()
        self._seen.add(node)
        below, at = node, self._file.tree.parent(node)
        if isinstance(at, cst.IfExp) and below is not at.test:
            return self._beside(at, at.orelse if below is at.body else at.body)
        if isinstance(at, cst.BooleanOperation):
            return self._beside(at, at.right if below is at.left else at.left)
        if isinstance(at, cst.NamedExpr) and below is at.value:
            return self.of(at) | self._of_target(at.target)
        if isinstance(at, cst.Arg):
            return self._of_argument(at)
        if isinstance(at, cst.Param):
            is_number = self._file.values.of(at.name).kind is Kind.NUMBER
            return {Sink.NUMBER} if is_number else self._of_target(at.name)
        if isinstance(at, cst.DictElement) and below is at.value:
            holder = self._file.tree.parent(at)
            key = string_value(at.key)
            return {Sink.NUMBER} if holder is None or key is None else self._of_entry(holder, key)
        if isinstance(at, cst.AssignTarget):
            at = self._file.tree.parent(at)
        if isinstance(at, cst.Assign) and len(at.targets) == 1:
            return self._of_target(at.targets[0].target)
        if isinstance(at, cst.AnnAssign):
            return self._of_target(at.target)
        return set() if _is_none(at) else {Sink.NUMBER}

    def _beside(self, choice: cst.BaseExpression, other: cst.BaseExpression) -> set[Sink]:
        """The sinks of a choice between a value and another; beside a number, a value is a number."""
        is_number = self._file.values.of(other).kind is Kind.NUMBER and not _asks_device(self._file, other)
        return {Sink.NUMBER} if is_number else self.of(choice)

    def _of_argument(self, argument: cst.Arg) -> set[Sink]:
        given = self._file.tree.given_to(argument)
        if given is None or not takes_device(given):
            return {Sink.NUMBER}
        if given.name == "dict" and not given.full and given.word:
            return self._of_entry(given.call, given.word)
        return {Sink.DEVICE}

    def _of_target(self, target: cst.CSTNode) -> set[Sink]:
        if isinstance(target, cst.Subscript):
            key = entry_key(target)
            if key is None or not isinstance(target.value, (cst.Name, cst.Attribute)):
                return {Sink.NUMBER}
            return self._of_entries(target.value, key, at=target)
        if not isinstance(target, (cst.Name, cst.Attribute)):
            return {Sink.NUMBER}
        name = last_name(target)
        if guess_by_name(name).kind is Kind.NUMBER:
            return {Sink.NUMBER}
        if isinstance(target, cst.Name):
            uses = self._file.tree.reads(target)
        else:
            uses = self._reads_of(target)
            if not uses and guess_by_name(name).kind is Kind.DEVICE:
                return {Sink.DEVICE}
        return set().union(*(self.of(use) for use in uses))

    def _reads_of(self, target: cst.Attribute) -> list[cst.CSTNode]:
        """Reads of an attribute with the same text, or else of any object's attribute of that name."""
        tree, text = self._file.tree, dotted(target)
        alike = [
            use
            for use in self._file.attributes.get(target.attr.value, [])
            if not isinstance(tree.parent(use), cst.AssignTarget) and tree.qualified(use) is None
        ]
        return [use for use in alike if dotted(use) == text] or [*alike]

    def _of_entry(self, holder: cst.CSTNode, key: str) -> set[Sink]:
        """The sinks of a dictionary entry: the calls that get it, or the reads of its key."""
        at = self._file.tree.parent(holder)
        if isinstance(at, cst.Arg):
            call = self._file.tree.parent(at)
            is_unpacked = at.star == "**" and isinstance(call, cst.Call)
            return {Sink.DEVICE if is_unpacked and key in DEVICE_KEYWORDS else Sink.NUMBER}
        if isinstance(at, cst.StarredDictElement):
            outer = self._file.tree.parent(at)
            return {Sink.NUMBER} if outer is None else self._of_entry(outer, key)
        if isinstance(at, cst.Assign) and len(at.targets) == 1:
            target: cst.CSTNode = at.targets[0].target
        elif isinstance(at, cst.AnnAssign):
            target = at.target
        else:
            return {Sink.NUMBER}
        if not isinstance(target, (cst.Name, cst.Attribute)):
            return {Sink.NUMBER}
        return self._of_entries(target, key, at=target)

    def _of_entries(self, holder: cst.Name | cst.Attribute, key: str, at: cst.CSTNode) -> set[Sink]:
        """The sinks of one key of the dictionary that a name or an attribute holds."""
        found: set[Sink] = set()
        for use in self._file.tree.reads(holder):
            if use in self._seen:
                continue
            self._seen.add(use)
            around = self._file.tree.parent(use)
            if isinstance(around, cst.Subscript) and around.value is use:
                is_set = around is at or isinstance(self._file.tree.parent(around), cst.AssignTarget)
                found |= self.of(around) if entry_key(around) == key and not is_set else set()
            elif isinstance(around, (cst.AssignTarget, cst.AnnAssign)):
                continue
            else:
                found |= self._of_entry(use, key)
        return found


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


def parameter_of(file: SourceFile, given: Given | None) -> cst.Param | None:
    """The parameter that gets an argument, if this file defines the called function."""
    function, is_bound = _defined(file, given.call) if given is not None else (None, False)
    if given is None or function is None or given.argument.star:
        return None
    listed = [*function.params.posonly_params, *function.params.params]
    if given.word:
        named = [*listed, *function.params.kwonly_params]
        return next((name for name in named if name.name.value == given.word), None)
    return None if given.index is None else next(iter(listed[given.index + is_bound :]), None)


def _defined(file: SourceFile, call: cst.Call) -> tuple[cst.FunctionDef | None, bool]:
    """The function of this file that a call runs, and whether Python passes its first argument (``self``)."""
    if isinstance(call.func, cst.Name):
        for assignment in file.tree.assignments(call.func):
            if isinstance(assignment.node, cst.FunctionDef):
                return assignment.node, False
            if isinstance(assignment.node, cst.ClassDef):
                return _method(assignment.node, "__init__"), True
        return None, False
    if not isinstance(call.func, cst.Attribute) or file.tree.qualified(call.func) is not None:
        return None, False
    name, receiver = call.func.attr.value, dotted(call.func.value)
    around = file.tree.around(call, cst.ClassDef)
    owners = [around] if receiver in ("self", "cls") and around is not None else []
    found = [method for owner in owners if (method := _method(owner, name))] or file.methods.get(name, [])
    if len(found) != 1:
        return None, False
    kinds = {dotted(decorator.decorator) for decorator in found[0].decorators}
    return found[0], "staticmethod" not in kinds


def _method(owner: cst.ClassDef, name: str) -> cst.FunctionDef | None:
    for statement in owner.body.body:
        if isinstance(statement, cst.FunctionDef) and statement.name.value == name:
            return statement
    return None


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
