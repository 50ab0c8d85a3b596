"""Where a value goes: to a place that takes a device, or to one that takes a number."""

from __future__ import annotations

from enum import Enum

import libcst as cst

from acclimate.port.source import SourceFile
from acclimate.port.tree import called_name, dotted, position
from acclimate.port.values import DEVICE_NAME

DEVICE_KEYWORDS = {"device", "map_location", "torch_device"}
DEVICE_METHODS = {"to", "cuda", "to_empty"}


class Sink(Enum):
    """What a place takes."""

    DEVICE = "device"
    NUMBER = "number"


def sink_of(file: SourceFile, node: cst.CSTNode) -> Sink:
    """Where an expression's value goes; a name that it is assigned to is followed in its own scope."""
    return _sink(file, node, depth=4)


def _sink(file: SourceFile, node: cst.CSTNode, depth: int) -> Sink:
    below, at = node, file.tree.parent(node)
    while isinstance(at, cst.IfExp) and below is not at.test:
        below, at = at, file.tree.parent(at)
    if isinstance(at, cst.Arg):
        call = file.tree.parent(at)
        return Sink.DEVICE if isinstance(call, cst.Call) and takes_device(file, call, at) else Sink.NUMBER
    if isinstance(at, cst.AssignTarget):
        at = file.tree.parent(at)
    if isinstance(at, cst.Assign) and depth and len(at.targets) == 1:
        return _sink_of_target(file, at.targets[0].target, depth)
    if isinstance(at, cst.AnnAssign) and depth:
        return _sink_of_target(file, at.target, depth)
    return Sink.NUMBER


def _sink_of_target(file: SourceFile, target: cst.CSTNode, depth: int) -> Sink:
    if isinstance(target, cst.Name):
        uses = file.tree.accesses(target)
    elif isinstance(target, cst.Attribute):
        uses = [
            node
            for node in file.tree.nodes
            if isinstance(node, cst.Attribute)
            and node.attr.value == target.attr.value
            and not isinstance(file.tree.parent(node), cst.AssignTarget)
        ]
        if not uses and DEVICE_NAME.search(target.attr.value):
            return Sink.DEVICE
    else:
        return Sink.NUMBER
    reads = [use for use in uses if use is not target]
    if reads and all(_sink(file, use, depth - 1) is Sink.DEVICE for use in reads):
        return Sink.DEVICE
    return Sink.NUMBER


def takes_device(file: SourceFile, call: cst.Call, argument: cst.Arg) -> bool:
    """Whether an argument of a call is a device, as torch defines the call."""
    if argument.keyword is not None:
        return argument.keyword.value in DEVICE_KEYWORDS and not _is_property_question(file, call)
    if argument.star:
        return False
    index = position(call, argument)
    name = file.tree.qualified(call.func)
    if name == "torch.device":
        return index == 0 and len(call.args) == 1
    if name == "torch.load":
        return index == 1
    return (
        name is None
        and called_name(call) in DEVICE_METHODS
        and index == 0
        and isinstance(call.func, cst.Attribute)
    )


def parameter_of(file: SourceFile, call: cst.Call, argument: cst.Arg) -> cst.Param | None:
    """The parameter that an argument is for, where this file defines what is called."""
    function, is_bound = _defined(file, call)
    if function is None or argument.star:
        return None
    listed = [*function.params.posonly_params, *function.params.params]
    if argument.keyword is not None:
        word = argument.keyword.value
        named = [*listed, *function.params.kwonly_params]
        return next((each for each in named if each.name.value == word), None)
    index = position(call, argument)
    if index is None:
        return None
    index += is_bound
    return listed[index] if index < len(listed) else None


def _defined(file: SourceFile, call: cst.Call) -> tuple[cst.FunctionDef | None, bool]:
    """The function of this file that a call runs, and whether its first parameter is given by Python."""
    if isinstance(call.func, cst.Name):
        for assignment in file.tree.assignments(call.func):
            if isinstance(assignment.node, cst.FunctionDef):
                return assignment.node, False
            if isinstance(assignment.node, cst.ClassDef):
                return _method(assignment.node, "__init__"), True
        return None, False
    if not isinstance(call.func, cst.Attribute) or file.tree.qualified(call.func) is not None:
        return None, False
    name = call.func.attr.value
    found = [each for owner in file.values.classes.values() if (each := _method(owner, name))]
    if len(found) != 1:
        return None, False
    kinds = {dotted(each.decorator) for each in found[0].decorators}
    return found[0], "staticmethod" not in kinds


def _method(owner: cst.ClassDef, name: str) -> cst.FunctionDef | None:
    for each in owner.body.body:
        if isinstance(each, cst.FunctionDef) and each.name.value == name:
            return each
    return None


def gets_to_device(file: SourceFile, parameter: cst.Param, depth: int = 3) -> bool:
    """Whether a parameter is a device: its name says so, or its function gives it to what takes a device."""
    if DEVICE_NAME.search(parameter.name.value):
        return True
    for use in file.tree.reads(parameter.name) if depth else []:
        holder = file.tree.parent(use)
        call = file.tree.parent(holder) if isinstance(holder, cst.Arg) else None
        if not isinstance(holder, cst.Arg) or not isinstance(call, cst.Call):
            continue
        if takes_device(file, call, holder):
            return True
        following = parameter_of(file, call, holder)
        if following is not None and gets_to_device(file, following, depth - 1):
            return True
    return False


def _is_property_question(file: SourceFile, call: cst.Call) -> bool:
    """Whether a call is one of torch.cuda's, which take numbers as well as devices."""
    return (file.tree.qualified(call.func) or "").startswith("torch.cuda.")
