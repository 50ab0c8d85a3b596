"""Names the accelerator in a function or module that asks for it often: ``acc = get_accelerator()``."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

import libcst as cst

from acclimate_port.new_code.edits import Edit, insert
from acclimate_port.source.tree import Span, Tree

_OFTEN = 4
_CHANGES_DEVICES = "VISIBLE_DEVICES"


def with_local_names(tree: Tree, edits: list[Edit], call: str, names: tuple[str, ...]) -> list[Edit]:
    """The edits, with a name for a call in each function, or the module itself, whose edits contain it often.

    The name is bound right before the first statement that uses it. It is not used in a file that chooses the
    visible devices, where an earlier look at the accelerator would see other devices.

    Args:
        tree: the file.
        edits: the edits.
        call: the text of the call: ``get_accelerator()``.
        names: names for its result; the first that the file does not use is taken.
    """
    used = tree.all_names()
    name = next((one for one in names if one not in used), None)
    if name is None or _CHANGES_DEVICES in tree.text:
        return edits
    by_function: dict[cst.FunctionDef | None, list[Edit]] = defaultdict(list)
    asking = [edit for edit in edits if any(isinstance(part, str) and call in part for part in edit.parts)]
    for edit, function in zip(asking, _innermost(tree, asking), strict=True):
        by_function[function].append(edit)
    changed: dict[Edit, Edit] = {}
    added: list[Edit] = []
    for function, own in by_function.items():
        count = sum(part.count(call) for edit in own for part in edit.parts if isinstance(part, str))
        place = (
            _place(tree, tree.module if function is None else function.body, own) if count >= _OFTEN else None
        )
        if place is None:
            continue
        line = tree.line_starts[tree.line(place) - 1]
        margin = tree.bytes[line:place].decode()
        added.append(insert(line, f"{margin}{name} = {call}{tree.newline}"))
        for edit in own:
            parts = tuple(part.replace(call, name) if isinstance(part, str) else part for part in edit.parts)
            changed[edit] = Edit(edit.start, edit.end, parts)
    return [*added, *(changed.get(edit, edit) for edit in edits)]


def _innermost(tree: Tree, edits: list[Edit]) -> list[cst.FunctionDef | None]:
    """The innermost function whose body contains each edit."""
    functions = sorted(tree.of_type(cst.FunctionDef), key=lambda node: tree.span(node.body).start)
    starts = [tree.span(node.body).start for node in functions]
    found: list[cst.FunctionDef | None] = []
    for edit in edits:
        index = bisect_right(starts, edit.start) - 1
        # Any function around the edit is the last one that starts before it, or is around that one.
        at: cst.CSTNode | None = functions[index] if index >= 0 else None
        while at is not None and not (isinstance(at, cst.FunctionDef) and _holds(tree.span(at.body), edit)):
            at = tree.function(at)
        found.append(at)
    return found


def _holds(place: Span, edit: Edit) -> bool:
    return place.start <= edit.start and edit.end <= place.end


def _place(tree: Tree, block: cst.CSTNode, edits: list[Edit]) -> int | None:
    """Where the first statement starts that edits change, in the smallest block with all of them."""
    if not isinstance(block, (cst.IndentedBlock, cst.Module)):
        return None
    first = min(edit.start for edit in edits)
    for statement in block.body:
        place = tree.span(statement)
        if first > place.end:  # an edit at the end of a statement inserts code that belongs to it
            continue
        for inner in _blocks(statement):
            if all(_holds(tree.span(inner), edit) for edit in edits):
                return _place(tree, inner, edits)
        decorators = statement.decorators if isinstance(statement, (cst.FunctionDef, cst.ClassDef)) else ()
        start = min([place.start, *(tree.span(one).start for one in decorators)])
        line = tree.line_starts[tree.line(start) - 1]
        return start if not tree.bytes[line:start].strip() else None
    return None


def _blocks(statement: cst.CSTNode) -> list[cst.BaseSuite]:
    """The blocks of a statement that run at most once each time it does."""
    if isinstance(statement, cst.If):
        other = statement.orelse
        below = _blocks(other) if isinstance(other, cst.If) else [other.body] if other is not None else []
        return [statement.body, *below]
    return [statement.body] if isinstance(statement, (cst.With, cst.Try)) else []
