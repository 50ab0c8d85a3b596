"""The package that defines a class or function, by the file's imports and definitions."""

from __future__ import annotations

from enum import Enum

import libcst as cst
from libcst.metadata.scope_provider import ImportAssignment

from acclimate_port.source.values import methods
from acclimate_port.source_file import SourceFile

_SAME_AS_TORCH = ("torch.", "deepspeed.comm.")
"""deepspeed.comm has the functions of torch.distributed, with the same parameters."""


class Origin(Enum):
    """The package that defines a class or function."""

    TORCH = "torch"
    OTHER = "other"
    UNKNOWN = "unknown"


def origin_of(file: SourceFile, function: cst.CSTNode) -> Origin:
    """The package that defines a called function; unknown if nothing shows it, or if branches differ."""
    names = _full_names(file, function, depth=4)
    is_torch = {name is not None and name.startswith(_SAME_AS_TORCH) for name in names}
    if not names or None in names or len(is_torch) > 1:
        return Origin.UNKNOWN
    return Origin.TORCH if is_torch == {True} else Origin.OTHER


def _full_names(file: SourceFile, node: cst.CSTNode, depth: int) -> set[str | None]:
    """The full names of a function where it is defined; a leading dot means this package."""
    if not depth or not isinstance(node, (cst.Name, cst.Attribute)):
        return {None}
    found: set[str | None] = set(file.tree.may_be(node))
    if isinstance(node, cst.Attribute):
        if found:
            return found
        owners = _full_names(file, node.value, depth)
        return {None if owner is None else f"{owner}.{node.attr.value}" for owner in owners}
    for assignment in file.tree.assignments(node):
        if isinstance(assignment, ImportAssignment):
            continue
        bound = assignment.node
        made = file.tree.value_of(bound)
        if isinstance(bound, cst.FunctionDef):
            found.add(f".{bound.name.value}")
        elif isinstance(bound, cst.ClassDef):
            found |= _names_of_class(file, bound, depth)
        elif made is not None:
            found |= _full_names(file, made, depth - 1)
        else:
            found.add(None)
    return found


def _names_of_class(file: SourceFile, definition: cst.ClassDef, depth: int) -> set[str | None]:
    """The full names of the base whose parameters a class of the file takes, unless it defines its own."""
    own = f".{definition.name.value}"
    if not definition.bases:
        return {own}
    names = _full_names(file, definition.bases[0].value, depth - 1)
    of_wrapper = {name for name in names if name is None or name.endswith(".DistributedDataParallel")}
    if not of_wrapper:
        return {own}
    return {None} if "__init__" in methods(definition) else names
