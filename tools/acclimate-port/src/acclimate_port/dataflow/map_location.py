"""Whether a device's name reaches a function that loads files; those accept ``"cpu"`` but not ``"cpu:0"``."""

from __future__ import annotations

import libcst as cst

from acclimate_port.dataflow.sinks import parameter_of
from acclimate_port.new_code.edits import Part
from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.source.tree import called_name, position
from acclimate_port.source_file import SourceFile

_LOADS_TO_DEVICE = {"load_file", "safe_open", "load_model"}
"""Functions of safetensors with an argument ``device``."""
_TAKE_ANY_EXPRESSION = (cst.Arg, cst.Assign, cst.AnnAssign, cst.Return, cst.Element, cst.DictElement)


def loadable(
    file: SourceFile, node: cst.CSTNode, *parts: Part, host: str = "{quote}cpu{quote}"
) -> tuple[Part, ...]:
    """The expression for a device with an index; ``"cpu"`` on a CPU-only machine if files are loaded to it.

    acclimate's name for the CPU has no index, so only ``--to torch`` needs this.
    """
    if isinstance(file.target, AcclimateTarget) or file.is_guarded(node) or not _is_loaded_to(file, node):
        return parts
    bare = isinstance(file.tree.parent(node), _TAKE_ANY_EXPRESSION)
    open_, close = ("", "") if bare else ("(", ")")
    beside = node if isinstance(node, cst.SimpleString) else file.tree.parent(node) or node
    host = host.replace("{quote}", file.quote(beside))
    return (open_, *parts, f" if {file.target.not_host} else {host}{close}")


def _is_loaded_to(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether an expression's value reaches a ``map_location``, or the ``device`` of safetensors.

    The value is followed through names, attributes, and parameters of the file's functions.
    """
    seen: set[cst.CSTNode] = set()
    waiting: list[cst.CSTNode] = [node]
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        below, around = at, file.tree.parent(at)
        if isinstance(around, cst.Arg):
            call = file.tree.parent(around)
            if isinstance(call, cst.Call) and _loads(file, call, around):
                return True
            waiting += _following(file, call, around) if isinstance(call, cst.Call) else []
        elif isinstance(around, cst.DictElement) and around.value is below:
            holder = file.tree.parent(around)
            waiting += [] if holder is None else [holder]
        elif isinstance(around, cst.Param):
            waiting += file.tree.reads(around.name)
        elif isinstance(around, (cst.IfExp, cst.BooleanOperation, cst.NamedExpr)):
            waiting.append(around)
            if isinstance(around, cst.NamedExpr) and isinstance(around.target, cst.Name):
                waiting += file.tree.reads(around.target)
        else:
            targets = _targets(around)
            waiting += [use for target in targets for use in file.tree.reads(target)]
    return False


def _loads(file: SourceFile, call: cst.Call, argument: cst.Arg) -> bool:
    word = argument.keyword.value if argument.keyword is not None else None
    if word is not None:
        return word == "map_location" or (word == "device" and called_name(call) in _LOADS_TO_DEVICE)
    return file.tree.qualified(call.func) == "torch.load" and position(call, argument) == 1


def _following(file: SourceFile, call: cst.Call, argument: cst.Arg) -> list[cst.CSTNode]:
    """The nodes that hold a call's argument: ``torch.device(…)``, ``str(…)``, or reads of a parameter."""
    if file.tree.qualified(call.func) == "torch.device" or called_name(call) == "str":
        return [call]
    parameter = parameter_of(file, call, argument)
    return [] if parameter is None else list(file.tree.reads(parameter.name))


def _targets(at: cst.CSTNode | None) -> list[cst.Name | cst.Attribute]:
    targets = [target.target for target in at.targets] if isinstance(at, cst.Assign) else []
    targets += [at.target] if isinstance(at, cst.AnnAssign) else []
    return [target for target in targets if isinstance(target, (cst.Name, cst.Attribute))]
