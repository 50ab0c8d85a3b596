"""Names that a function imports itself: in all of the function they are local, also before that import."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.conditions.statements import leaves
from acclimate_port.source.tree import packages_of, walk
from acclimate_port.source_file import SourceFile

NOT_IMPORTED = "the file imports torch only where it needs it, and not here"
WITHOUT_TORCH = "the file imports no torch, and the edit would"
GIVEN_TORCH = "`torch` is a parameter, so a caller may give something else"
REASON = "the function imports {} itself, which makes it a local name that has no value here yet"


def reason_without_value(file: SourceFile, node: cst.CSTNode, code: list[str]) -> str:
    """Why new code cannot stand at a node: it needs a name that has no value there; ``""`` if it can."""
    for name in (file.torch.partition(".")[0], file.accelerator, file.helper):
        is_needed = any(re.search(rf"(?<![\w.]){re.escape(name)}\b", part) for part in code)
        if is_needed and _is_imported_later(file, node, name):
            return REASON.format(name)
    needs_torch = any(f"{file.torch}." in part for part in code) and file.imports_torch_in_functions
    return NOT_IMPORTED if needs_torch and not imports_before(file, node, file.torch) else ""


def imports_torch_anew(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether new code makes a module import torch that does not, and a function that has not done so yet."""
    if not file.is_without_torch:
        return False
    return not any(
        file.tree.function(one) is not None and _is_before(file, one, node) for one in file.tree.imports
    )


def gets_torch(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a function around a node gets torch, or something in its place, as a parameter."""
    function = file.tree.function(node)
    while function is not None:
        if any(
            one.name.value == "torch" for one in (*function.params.params, *function.params.kwonly_params)
        ):
            return True
        function = file.tree.function(function)
    return False


def _is_imported_later(file: SourceFile, node: cst.CSTNode, name: str) -> bool:
    """Whether the function of a name imports it, but not before the node in a block around it."""
    function = file.tree.function(node)
    while function is not None:
        own = [
            one for one in file.tree.imports if file.tree.function(one) is function and name in _bound(one)
        ]
        if own:
            return not any(_is_before(file, one, node) for one in own)
        function = file.tree.function(function)
    return False


def imports_before(file: SourceFile, node: cst.CSTNode, name: str) -> bool:
    """Whether a function around a node imports a name before it."""
    return any(
        name in _bound(one) and file.tree.function(one) is not None and _is_before(file, one, node)
        for one in file.tree.imports
    )


def torchs_import_before(file: SourceFile, node: cst.CSTNode) -> cst.SimpleStatementLine | None:
    """The last line before a node in which a function imports torch, so that the node can use it."""
    lines = [
        line
        for one in file.tree.imports
        if "torch" in packages_of(one)
        and file.tree.function(one) is not None
        and isinstance(line := file.tree.parent(one), cst.SimpleStatementLine)
        and file.span(line).end <= file.span(node).start
        and _is_before(file, one, node)
    ]
    return max(lines, key=lambda line: file.span(line).start, default=None)


def lacks_import(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether an import of acclimate for a node has no place, as torch is imported in other functions."""
    return file.imports_in_functions and torchs_import_before(file, node) is None


def _bound(statement: cst.Import | cst.ImportFrom) -> set[str]:
    """The names to which an import gives a value."""
    if isinstance(statement.names, cst.ImportStar):
        return set()
    return {(alias.evaluated_alias or alias.evaluated_name).partition(".")[0] for alias in statement.names}


def _is_before(file: SourceFile, statement: cst.CSTNode, node: cst.CSTNode) -> bool:
    """Whether an import has been made when a node runs: it is earlier in a block around the node.

    Of a ``try`` the handlers must leave, or the node must be in its ``else`` or use torch itself.
    """
    if file.span(statement).start >= file.span(node).start:
        return False
    around = {id(one) for one in file.tree.ancestors(node)}
    for below, at in file.tree.upwards(statement):
        if isinstance(at, (cst.IndentedBlock, cst.SimpleStatementSuite)):
            if id(at) in around:
                return True
        elif isinstance(at, cst.Try):
            has_ended = all(leaves(handler.body) for handler in at.handlers) or id(at.orelse) in around
            if below is not at.body or not (has_ended or _uses(file, node)):
                return False
        elif not isinstance(at, (cst.SimpleStatementLine, cst.With)):
            return False
    return False


def _uses(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a node uses torch by its name."""
    return any(isinstance(one, cst.Name) and one.value == file.torch for one in walk(node))
