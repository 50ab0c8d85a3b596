"""The ``if`` statements around tests, and blocks that leave a function or loop, or raise."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from acclimate_port.source.tree import called_name, walk
from acclimate_port.source_file import SourceFile


def whole_condition(file: SourceFile, part: cst.CSTNode) -> cst.CSTNode:
    """The whole condition that a test is part of, through ``and``, ``or`` and ``not``."""
    whole, above = part, file.tree.parent(part)
    while isinstance(above, (cst.UnaryOperation, cst.BooleanOperation)):
        whole, above = above, file.tree.parent(above)
    return whole


def decided_by(file: SourceFile, question: cst.CSTNode) -> cst.If | cst.IfExp | None:
    """The ``if`` statement or conditional expression whose condition is, or contains, a test."""
    whole = whole_condition(file, question)
    above = file.tree.parent(whole)
    return above if isinstance(above, (cst.If, cst.IfExp)) and above.test is whole else None


def later_tests(file: SourceFile, statement: cst.If) -> Iterator[cst.If]:
    """The ``elif`` branches of a statement, and the ``if`` statements after it if all its branches leave."""
    last: cst.CSTNode = statement
    at: cst.If | cst.Else | None = statement.orelse
    all_leave = leaves(statement.body)
    while isinstance(at, cst.If):
        yield at
        all_leave = all_leave and leaves(at.body)
        at = at.orelse
    # The parent of an `elif` is the `if` before it.
    while isinstance(holder := file.tree.parent(last), cst.If):
        last = holder
    block = file.tree.parent(last)
    if not all_leave or at is not None or not isinstance(block, (cst.IndentedBlock, cst.Module)):
        return
    statements: list[cst.CSTNode] = list(block.body)
    following = statements[statements.index(last) + 1 :] if last in statements else []
    for later in following:
        if not isinstance(later, cst.If):
            return
        yield later


def leaves(block: cst.BaseSuite) -> bool:
    """Whether a block ends with ``return``, ``raise``, ``continue`` or ``break``."""
    last = block.body[-1] if block.body else None
    if isinstance(last, cst.SimpleStatementLine):
        last = last.body[-1]
    return isinstance(last, (cst.Return, cst.Raise, cst.Continue, cst.Break)) or _ends_program(last)


def refuses(block: cst.CSTNode) -> bool:
    """Whether a block, or a statement, raises or ends the program."""
    for node in walk(block):
        if isinstance(node, (cst.Raise, cst.Assert)):
            return True
        if isinstance(node, cst.Call) and called_name(node) in ("exit", "_exit", "quit", "skip", "SkipTest"):
            return True
        if isinstance(node, cst.Expr) and _ends_program(node):
            return True
    return False


_ENDS = re.compile(r"(^|_)(exit|abort|die|fatal)(_|$)", re.IGNORECASE)


def _ends_program(statement: cst.CSTNode | None) -> bool:
    """Whether a statement calls a function that ends the program by its name: ``log_and_exit("no GPU")``."""
    call = statement.value if isinstance(statement, cst.Expr) else None
    return isinstance(call, cst.Call) and _ENDS.search(called_name(call) or "") is not None
