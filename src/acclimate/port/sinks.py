"""Where a value goes: to a place that takes a device, or to one that takes a number."""

from __future__ import annotations

from enum import Enum

import libcst as cst

from acclimate.port.source import SourceFile
from acclimate.port.tree import called_name, positional
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
    arguments = positional(call)
    index = next((i for i, each in enumerate(arguments) if each is argument), None)
    name = file.tree.qualified(call.func)
    if name == "torch.device":
        return index == 0 and len(arguments) == 1 and len(call.args) == 1
    if name == "torch.load":
        return index == 1
    return (
        name is None
        and called_name(call) in DEVICE_METHODS
        and index == 0
        and isinstance(call.func, cst.Attribute)
    )


def _is_property_question(file: SourceFile, call: cst.Call) -> bool:
    """Whether a call is one of torch.cuda's, which take numbers as well as devices."""
    return (file.tree.qualified(call.func) or "").startswith("torch.cuda.")
