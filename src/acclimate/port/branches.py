"""What stands beside a test of the device: a branch that a program has for the host."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from acclimate.port.source import SourceFile
from acclimate.port.tree import string_value, walk


def has_host_branch(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a test is one of several, and a later one is true on the host.

    On a machine without an accelerator that later branch is the right one, so the test must stay false there.
    """
    below = node
    for around in file.tree.ancestors(node):
        if isinstance(around, cst.If) and below is around.test:
            return any(_is_true_on_host(each.test) for each in _later_tests(file, around))
        if isinstance(around, cst.IfExp) and below is around.test:
            other = around.orelse
            return isinstance(other, cst.IfExp) and _is_true_on_host(other.test)
        if isinstance(around, cst.Match):
            return any(
                isinstance(each.pattern, cst.MatchValue) and string_value(each.pattern.value) == "cpu"
                for each in around.cases
            )
        if not isinstance(around, (cst.BooleanOperation, cst.MatchCase, cst.MatchValue)):
            return False
        below = around
    return False


def _later_tests(file: SourceFile, statement: cst.If) -> Iterator[cst.If]:
    """The ``elif`` branches of a statement, and the ``if`` statements below one whose branches all leave."""
    last: cst.CSTNode = statement
    at: cst.If | cst.Else | None = statement.orelse
    leaves = _leaves(statement.body)
    while isinstance(at, cst.If):
        yield at
        leaves = leaves and _leaves(at.body)
        at = at.orelse
    while isinstance(holder := file.tree.parent(last), cst.If):  # an `elif` is held by the `if` before it
        last = holder
    block = file.tree.parent(last)
    if not leaves or at is not None or not isinstance(block, (cst.IndentedBlock, cst.Module)):
        return
    statements: list[cst.CSTNode] = list(block.body)
    following = statements[statements.index(last) + 1 :] if last in statements else []
    for each in following:
        if not isinstance(each, cst.If):
            return
        yield each


def _leaves(block: cst.BaseSuite) -> bool:
    """Whether a block ends with ``return`` or the like."""
    last = block.body[-1] if block.body else None
    if isinstance(last, cst.SimpleStatementLine):
        last = last.body[-1]
    return isinstance(last, (cst.Return, cst.Raise, cst.Continue, cst.Break))


def _is_true_on_host(test: cst.CSTNode) -> bool:
    """Whether a condition asks for the host: ``device.type == "cpu"``, ``x.is_cpu``."""
    for node in walk(test):
        if isinstance(node, cst.Attribute) and node.attr.value == "is_cpu":
            return True
        if not isinstance(node, cst.Comparison):
            continue
        operators = [each.operator for each in node.comparisons]
        asks = all(isinstance(each, (cst.Equal, cst.In)) for each in operators)
        if asks and any(string_value(each) == "cpu" for each in walk(node)):
            return True
    return False
