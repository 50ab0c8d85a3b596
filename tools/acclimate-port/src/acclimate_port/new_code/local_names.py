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

    The name is bound right before the first statement that uses it. In a module, the branches of an ``if``,
    which an import may not run, have a name of their own: ``if __name__ == "__main__":``. The cells of a
    notebook share a name that its imports bind, see ``name_for_notebook``. No name is used in a file that
    chooses the visible devices, where an earlier look at the accelerator would see other devices.

    Args:
        tree: the file.
        edits: the edits.
        call: the text of the call: ``get_accelerator()``.
        names: names for its result; the first that the file does not use is taken.
    """
    name = _free(tree, names)
    if name is None:
        return edits
    asking = _asking(edits, call)
    by_function: dict[cst.FunctionDef | None, list[Edit]] = defaultdict(list)
    for edit, function in zip(asking, _innermost(tree, asking), strict=True):
        by_function[function].append(edit)
    groups: list[tuple[cst.CSTNode, list[Edit]]] = []
    for around, own in by_function.items():
        if around is not None:
            groups.append((around.body, own))
        elif not tree.is_notebook:
            groups += _of_module(tree, tree.module, own)
    changed: dict[Edit, Edit] = {}
    added: list[Edit] = []
    for block, own in groups:
        place = _place(tree, block, own) if _count(own, call) >= _OFTEN else None
        if place is None:
            continue
        line = tree.line_starts[tree.line(place) - 1]
        margin = tree.bytes[line:place].decode()
        added.append(insert(line, f"{margin}{name} = {call}{tree.newline}"))
        changed |= {edit: _renamed(edit, call, name) for edit in own}
    return [*added, *(changed.get(edit, edit) for edit in edits)]


def name_for_notebook(
    tree: Tree, edits: list[Edit], call: str, names: tuple[str, ...]
) -> tuple[str, list[Edit]]:
    """The statement that names a call for all cells of a notebook, and the edits with this name.

    It belongs to the imports: a reader may skip any later cell, or run it alone. ``""``: there is none.

    Args:
        tree: the cells of a notebook.
        edits: the edits.
        call: the text of the call.
        names: names for its result.
    """
    name = _free(tree, names)
    asking = _asking(edits, call)
    of_module = [
        edit for edit, around in zip(asking, _innermost(tree, asking), strict=True) if around is None
    ]
    if name is None or _count(of_module, call) < _OFTEN:
        return "", edits
    changed = {edit: _renamed(edit, call, name) for edit in of_module}
    return f"{name} = {call}", [changed.get(edit, edit) for edit in edits]


def _free(tree: Tree, names: tuple[str, ...]) -> str | None:
    """The first of some names that a file does not use; ``None`` if it chooses the visible devices."""
    used = tree.all_names()
    name = next((one for one in names if one not in used), None)
    return None if _CHANGES_DEVICES in tree.text else name


def _asking(edits: list[Edit], call: str) -> list[Edit]:
    return [edit for edit in edits if any(isinstance(part, str) and call in part for part in edit.parts)]


def _count(edits: list[Edit], call: str) -> int:
    return sum(part.count(call) for edit in edits for part in edit.parts if isinstance(part, str))


def _renamed(edit: Edit, call: str, name: str) -> Edit:
    parts = tuple(part.replace(call, name) if isinstance(part, str) else part for part in edit.parts)
    return Edit(edit.start, edit.end, parts)


def _of_module(tree: Tree, block: cst.CSTNode, edits: list[Edit]) -> list[tuple[cst.CSTNode, list[Edit]]]:
    """The edits of a module by the block that surely runs them: itself, or a branch that comes first.

    As soon as a statement surely makes the call, all that follows may use its result.
    """
    lines = block.body if isinstance(block, (cst.IndentedBlock, cst.Module)) else ()
    found: list[tuple[cst.CSTNode, list[Edit]]] = []
    waiting = sorted(edits, key=lambda edit: edit.start)
    for statement in lines:
        place = tree.span(statement)
        own = [edit for edit in waiting if _holds(place, edit)]
        inner = [tree.span(one) for one in _blocks(statement)] if isinstance(statement, cst.If) else []
        if own and not all(any(_holds(one, edit) for one in inner) for edit in own):
            return [*found, (block, waiting)]
        for branch in _blocks(statement) if own else ():
            held = [edit for edit in own if _holds(tree.span(branch), edit)]
            found += _of_module(tree, branch, held) if held else []
        waiting = [edit for edit in waiting if edit not in own]
    return [*found, (block, waiting)] if waiting else found


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
