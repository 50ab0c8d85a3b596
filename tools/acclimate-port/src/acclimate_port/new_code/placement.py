"""Where in a file to insert new imports and helper functions."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import libcst as cst

from acclimate_port.new_code.edits import Edit, insert
from acclimate_port.source.tree import CELL, Tree, dotted

_CELL_START = CELL.partition("{")[0].encode()
_FIRST_PARTY_GUESS = frozenset(sys.stdlib_module_names)


@dataclass(frozen=True)
class _Line:
    """A top-level import statement on its own line."""

    node: cst.Import | cst.ImportFrom
    first: int
    last: int
    module: str

    @property
    def is_from(self) -> bool:
        return isinstance(self.node, cst.ImportFrom)

    @property
    def is_future(self) -> bool:
        return self.module == "__future__"

    @property
    def is_standard(self) -> bool:
        return self.module.partition(".")[0] in _FIRST_PARTY_GUESS


def new_lines(
    tree: Tree, first_use: int, uses: list[int], imports: list[str], helpers: list[str], names: list[str]
) -> list[Edit]:
    """Insertions of import statements, functions and names, before the first code that uses them at import.

    In a notebook, they go to the first cell that imports torch, as a reader may skip any other, and to each
    that uses them and imports torch itself, as it may run alone.

    Args:
        tree: the file.
        first_use: the offset of the first use that runs at import; the end of the file if none does.
        uses: the offsets of all uses.
        imports: whole statements.
        helpers: the texts of functions.
        names: statements that bind names by these imports and functions.
    """
    every = _import_lines(tree)
    lines = [line for line in every if tree.line_starts[line.first - 1] < first_use]
    if not (tree.is_notebook and lines):
        return _new_lines_after(tree, lines, imports, helpers, names)
    of_torch = [line for line in lines if line.module.partition(".")[0] == "torch"]
    first = _cell(tree, tree.line_starts[(of_torch or lines)[0].first - 1])
    by_cell: dict[int, list[_Line]] = defaultdict(list)
    for line in every:
        by_cell[_cell(tree, tree.line_starts[line.first - 1])].append(line)
    using = {_cell(tree, use) for use in uses}
    alone = [cell for cell in by_cell if cell in using and _imports_torch(by_cell[cell])]
    cells = alone if using and using.issubset(alone) else dict.fromkeys((first, *alone))
    return [edit for cell in cells for edit in _new_lines_after(tree, by_cell[cell], imports, helpers, names)]


def _imports_torch(lines: list[_Line]) -> bool:
    return any(line.module.partition(".")[0] == "torch" for line in lines)


def _new_lines_after(
    tree: Tree, lines: list[_Line], imports: list[str], helpers: list[str], names: list[str]
) -> list[Edit]:
    """The same insertions beside some imports."""
    newline = tree.newline
    edits: list[Edit] = []
    at_end = ""
    for statement in imports:
        place = _place_for(statement, lines)
        if place is None:
            at_end += statement + newline
        else:
            line, after, gap = place
            offset = _line_start(tree, line.last + 1 if after else line.first)
            lead = newline if gap else ""
            if offset == len(tree.bytes) and not tree.text.endswith(("\n", "\r")):
                lead = newline + lead
            edits.append(insert(offset, f"{lead}{statement}{newline}"))
    if not helpers and not at_end and not names:
        return edits
    offset = _after_head(tree, lines)
    text = at_end
    if helpers:
        body = "\n\n".join(helpers).replace("    ", tree.indent).replace("\n", newline)
        text = f"{text}{newline}{newline}{body}" if lines or at_end else f"{text}{body}"
        text += "".join(f"{newline}{newline}{name}{newline}" for name in names)
        following = tree.bytes[offset:].lstrip(b"\r\n")
        if following:
            present = len(tree.bytes[offset:]) - len(following)
            text += newline * max(0, 2 - present // len(newline))
    elif lines == [] and tree.bytes[offset:].strip() and tree.bytes[offset : offset + 1] not in b"\r\n":
        text += newline
    if not helpers:
        text += "".join(f"{name}{newline}" for name in names)
    edits.append(insert(offset, text))
    return edits


def _cell(tree: Tree, offset: int) -> int:
    """Where the cell of a notebook begins that holds an offset."""
    return tree.bytes.rfind(_CELL_START, 0, offset)


def _import_lines(tree: Tree) -> list[_Line]:
    """The imports before the module's first definition; in a notebook, those of all cells."""
    found: list[_Line] = []
    for statement in tree.module.body:
        is_definition = isinstance(statement, (cst.FunctionDef, cst.ClassDef))
        if is_definition and found and not tree.is_notebook:
            break
        if not isinstance(statement, cst.SimpleStatementLine):
            continue
        for node in statement.body:
            if isinstance(node, (cst.Import, cst.ImportFrom)) and len(statement.body) == 1:
                place = tree.span(node)
                first = tree.line(place.start)
                last = tree.line(place.end - 1)
                if isinstance(node, cst.ImportFrom):
                    module = "." * len(node.relative) + dotted(node.module)
                else:
                    module = dotted(node.names[0].name)
                found.append(_Line(node, first, last, module))
    return found


def _place_for(statement: str, lines: list[_Line]) -> tuple[_Line, bool, bool] | None:
    """The line next to which a statement goes, whether after it, and whether with a blank line between."""
    is_from, module = statement.startswith("from "), statement.split()[1]
    others = [line for line in lines if not line.is_future and not line.module.startswith(".")]
    anchor = next((line for line in others if line.module.partition(".")[0] == "torch"), None)
    third_party = [line for line in others if not line.is_standard]
    if anchor is None:
        anchor = third_party[0] if third_party else None
    if anchor is None:
        last = [line for line in lines if not line.module.startswith(".")]
        return (last[-1], True, True) if last else None
    group = _group(lines, anchor)
    if is_from:
        # `import x` comes before `from x import y` in the usual order, and names are sorted.
        later = [line for line in group if line.is_from and line.module > module]
        mixed = any(line.is_from and not following.is_from for line, following in pairwise(group))
        if later and not mixed:
            return later[0], False, False
        return (anchor, True, False) if mixed else (group[-1], True, False)
    plain = [line for line in group if not line.is_from]
    earlier = [line for line in plain if line.module < module]
    if earlier:
        return earlier[-1], True, False
    return group[0], False, False


def _group(lines: list[_Line], anchor: _Line) -> list[_Line]:
    """The block of adjacent lines that contains a line."""
    index = lines.index(anchor)
    start = end = index
    while start and lines[start - 1].last + 1 == lines[start].first and not lines[start - 1].is_future:
        start -= 1
    while end + 1 < len(lines) and lines[end].last + 1 == lines[end + 1].first:
        end += 1
    group = lines[start : end + 1]
    return [line for line in group if not line.module.startswith(".")]


def _line_start(tree: Tree, line: int) -> int:
    starts = tree.line_starts
    return starts[line - 1] if line <= len(starts) else len(tree.bytes)


def _after_head(tree: Tree, lines: list[_Line]) -> int:
    """The offset after the imports, or after the docstring if there are no imports."""
    if lines:
        return _line_start(tree, max(line.last for line in lines) + 1)
    for statement in tree.module.body:
        is_text = (
            isinstance(statement, cst.SimpleStatementLine)
            and isinstance(statement.body[0], cst.Expr)
            and isinstance(statement.body[0].value, (cst.SimpleString, cst.ConcatenatedString))
        )
        if is_text:
            return _line_start(tree, tree.line(tree.span(statement).end - 1) + 1)
        break
    first = next(iter(tree.module.body), None)
    return tree.span(first).start if first is not None else len(tree.bytes)
