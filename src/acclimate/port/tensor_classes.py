"""Names that hold one of torch's old tensor classes: ``Tensor = torch.cuda.FloatTensor if cuda else …``."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from acclimate.port.source import SourceFile
from acclimate.port.tree import called_name, dotted

_TAKES_CLASS = {"set_default_tensor_type", "isinstance", "issubclass"}


def is_alias(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a class is given a name, alone or as one branch of a choice."""
    return _holder(file, node) is not None


def type_calls(file: SourceFile, node: cst.CSTNode) -> list[cst.Attribute] | None:
    """The ``x.type`` of every ``x.type(Tensor)`` where the name holds this class.

    ``None`` where a function that needs a real class gets it.
    """
    found: list[cst.Attribute] = []
    for use in [node, *_uses(file, _holder(file, node))]:
        argument = file.tree.parent(use)
        call = file.tree.parent(argument) if isinstance(argument, cst.Arg) else None
        if not isinstance(call, cst.Call):
            continue
        if called_name(call) in _TAKES_CLASS:
            return None
        if called_name(call) == "type" and len(call.args) == 1 and isinstance(call.func, cst.Attribute):
            found.append(call.func)
    return found


def tensor_classes(file: SourceFile, name: cst.CSTNode) -> list[cst.CSTNode]:
    """The expressions whose value a name or an attribute may hold, each branch of a choice alone."""
    found: list[cst.CSTNode] = []
    for assignment in file.tree.of_type(cst.Assign):
        for each in assignment.targets:
            holds = isinstance(each.target, (cst.Name, cst.Attribute)) and each.target is not name
            if holds and dotted(each.target) == dotted(name) and name in _uses(file, each.target):
                found += _branches(assignment.value)
    return found


def _branches(value: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if isinstance(value, cst.IfExp):
        yield from _branches(value.body)
        yield from _branches(value.orelse)
    else:
        yield value


def _holder(file: SourceFile, node: cst.CSTNode) -> cst.CSTNode | None:
    """The name or attribute that an expression is assigned to."""
    at = file.tree.parent(node)
    while isinstance(at, cst.IfExp):
        at = file.tree.parent(at)
    return at.targets[0].target if isinstance(at, cst.Assign) and len(at.targets) == 1 else None


def _uses(file: SourceFile, holder: cst.CSTNode | None) -> list[cst.CSTNode]:
    """Where a name or an attribute is read."""
    if isinstance(holder, cst.Name):
        return [use for use in file.tree.accesses(holder) if use is not holder]
    if isinstance(holder, cst.Attribute):
        text = dotted(holder)
        return [use for use in file.tree.of_type(cst.Attribute) if use is not holder and dotted(use) == text]
    return []
