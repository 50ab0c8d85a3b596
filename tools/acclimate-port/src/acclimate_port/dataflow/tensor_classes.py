"""Names that hold one of torch's old tensor classes: ``Tensor = torch.cuda.FloatTensor if cuda else …``."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from acclimate_port.source.tree import dotted
from acclimate_port.source_file import SourceFile

_TAKES_CLASS = {"set_default_tensor_type", "isinstance", "issubclass"}


def is_alias(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a class is assigned to a name, directly or as one branch of a conditional expression."""
    return _holder(file, node) is not None


def type_calls(file: SourceFile, node: cst.CSTNode) -> list[cst.Attribute] | None:
    """The ``x.type`` of every ``x.type(Tensor)`` where ``Tensor`` holds this class.

    ``None`` if a function that needs a real class gets the name.
    """
    found: list[cst.Attribute] = []
    holder = _holder(file, node)
    reads = file.tree.reads(holder) if isinstance(holder, (cst.Name, cst.Attribute)) else []
    for use in [node, *reads]:
        given = file.tree.given_to(use)
        name, call = (given.name, given.call) if given is not None else ("", None)
        if name in _TAKES_CLASS:
            return None
        if (
            call is not None
            and name == "type"
            and len(call.args) == 1
            and isinstance(call.func, cst.Attribute)
        ):
            found.append(call.func)
    return found


def tensor_classes(file: SourceFile, name: cst.CSTNode) -> list[cst.CSTNode]:
    """The expressions assigned to a name or an attribute, with each branch of a conditional expression."""
    found: list[cst.CSTNode] = []
    for assignment in file.tree.of_type(cst.Assign):
        for assigned in assignment.targets:
            target = assigned.target
            if not isinstance(target, (cst.Name, cst.Attribute)) or dotted(target) != dotted(name):
                continue
            if name in file.tree.reads(target):
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
