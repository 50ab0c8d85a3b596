"""Whether a test such as ``isinstance(x, torch.Tensor)`` shows that a value is a tensor or a module."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from acclimate_port.conditions.statements import leaves
from acclimate_port.source.tree import called_name, dotted
from acclimate_port.source.values import Kind
from acclimate_port.source_file import SourceFile

_CLASSES = {
    *("torch.Tensor", "torch._tensor.Tensor", "torch.tensor.Tensor", "torch.autograd.Variable"),
    *("torch.FloatTensor", "torch.LongTensor", "torch.nn.utils.rnn.PackedSequence"),
}
_DEPTH = 3
_COMPREHENSIONS = (cst.ListComp, cst.SetComp, cst.GeneratorExp, cst.DictComp)


def is_tested_to_be_torchs(file: SourceFile, value: cst.CSTNode) -> bool:
    """Whether a test that is true here shows that a value is torch's tensor or module."""
    if not isinstance(value, (cst.Name, cst.Attribute, cst.Subscript)):
        return False
    text = file.tree.source(value)
    return any(
        _shows(file, test, text, positive, _DEPTH) and not _is_bound_between(file, test, value, text)
        for test, positive in _known_tests(file, value)
    )


def _known_tests(file: SourceFile, node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, bool]]:
    """The tests that are known at a node, each with whether it is true there."""
    for below, around in file.tree.upwards(node):
        if isinstance(around, (cst.If, cst.IfExp)) and below is not around.test:
            yield around.test, below is around.body
        elif isinstance(around, cst.BooleanOperation) and below is around.right:
            yield around.left, isinstance(around.operator, cst.And)
        elif isinstance(around, _COMPREHENSIONS) and below is not around.for_in:
            loop: cst.CompFor | None = around.for_in
            while loop is not None:
                yield from ((condition.test, True) for condition in loop.ifs)
                loop = loop.inner_for_in
        elif isinstance(around, cst.MatchCase) and below is around.body:
            yield around, True
        elif isinstance(around, (cst.IndentedBlock, cst.Module)):
            yield from _before(file, around, below)
        elif isinstance(around, (cst.FunctionDef, cst.ClassDef)):
            return


def _before(
    file: SourceFile, block: cst.IndentedBlock | cst.Module, statement: cst.CSTNode
) -> Iterator[tuple[cst.CSTNode, bool]]:
    """The tests that earlier statements leave known: ``if not isinstance(x, Tensor): return x``."""
    known = file.tests_in_blocks
    if id(block) not in known:
        known[id(block)] = [found for earlier in block.body for found in _left_known(earlier)]
    end = file.span(statement).start
    for test, positive in known[id(block)]:
        if file.span(test).start >= end:
            return
        yield test, positive


def _left_known(statement: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, bool]]:
    if isinstance(statement, cst.If) and statement.orelse is None and leaves(statement.body):
        yield statement.test, False
    for small in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
        if isinstance(small, cst.Assert):
            yield small.test, True


def _shows(file: SourceFile, test: cst.CSTNode, text: str, positive: bool, depth: int) -> bool:
    """Whether a test, true or false, shows that what a text names is a tensor or a module."""
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return _shows(file, test.expression, text, not positive, depth)
    if isinstance(test, cst.BooleanOperation):
        sides = [_shows(file, side, text, positive, depth) for side in (test.left, test.right)]
        return any(sides) if isinstance(test.operator, cst.And) == positive else all(sides)
    if isinstance(test, cst.Name) and depth:
        found = file.bound_values(test)
        return len(found) == 1 and found[0] is not None and _shows(file, found[0], text, positive, depth - 1)
    if isinstance(test, cst.MatchCase):
        match = file.tree.parent(test)
        is_subject = isinstance(match, cst.Match) and file.tree.source(match.subject) == text
        return is_subject and isinstance(test.pattern, cst.MatchClass) and _is_torchs(file, test.pattern.cls)
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        target = test.comparisons[0]
        asks = isinstance(test.left, cst.Call) and called_name(test.left) == "type" and test.left.args
        is_same = isinstance(target.operator, (cst.Is, cst.Equal)) and positive
        is_other = isinstance(target.operator, (cst.IsNot, cst.NotEqual)) and not positive
        if not asks or not (is_same or is_other):
            return False
        return file.tree.source(asks[0].value) == text and _is_torchs(file, target.comparator)
    if not positive or not isinstance(test, cst.Call) or not test.args:
        return False
    if file.tree.source(test.args[0].value) != text:
        return False
    if file.tree.qualified(test.func) == "torch.is_tensor":
        return True
    return dotted(test.func) == "isinstance" and len(test.args) == 2 and _is_torchs(file, test.args[1].value)


def _is_torchs(file: SourceFile, kind: cst.CSTNode) -> bool:
    """Whether a class, or each of several, is torch's: a tensor, a parameter, a module."""
    if isinstance(kind, cst.Tuple):
        return all(_is_torchs(file, element.value) for element in kind.elements)
    if isinstance(kind, cst.BinaryOperation):
        return _is_torchs(file, kind.left) and _is_torchs(file, kind.right)
    name = file.tree.qualified(kind)
    if name is not None:
        last = name.rpartition(".")[2]
        return name in _CLASSES or (name.startswith("torch.nn.") and last[:1].isupper())
    return isinstance(kind, cst.Name) and file.values.instance_of(kind.value).kind is Kind.MODULE


def _is_bound_between(file: SourceFile, test: cst.CSTNode, value: cst.CSTNode, text: str) -> bool:
    """Whether the program binds a name or an attribute again after a test, before a use."""
    first, last = file.span(test).end, file.span(value).start
    own = file.tree.statement(value)
    if isinstance(value, cst.Name):
        targets = [assignment.node for assignment in file.tree.assignments(value)]
    else:
        targets = [
            target.target
            for target in file.tree.of_type(cst.AssignTarget)
            if file.tree.source(target.target) == text
        ]
    return any(
        first <= file.span(target).start < last and file.tree.statement(target) is not own
        for target in targets
    )
