"""Tests of whether there is a device, or how many there are, and figures that must not be 0."""

from __future__ import annotations

import libcst as cst

from acclimate_port.conditions.statements import leaves, refuses
from acclimate_port.dataflow.uses import uses_of
from acclimate_port.source.tree import dotted, walk
from acclimate_port.source_file import SourceFile


def divides(file: SourceFile, number: cst.CSTNode) -> bool:
    """Whether a number reaches a use as a divisor, which must not be 0; names that hold it are followed."""
    uses = uses_of(file, number, computed=True, unless=_is_asked_before)
    return any(_is_divisor(file, use) for use in uses)


def _is_divisor(file: SourceFile, use: cst.CSTNode) -> bool:
    at = file.tree.parent(use)
    if isinstance(at, cst.BinaryOperation):
        is_text = isinstance(at.left, (cst.SimpleString, cst.ConcatenatedString, cst.FormattedString))
        is_division = isinstance(at.operator, (cst.FloorDivide, cst.Divide, cst.Modulo))
        return at.right is use and is_division and not is_text
    if isinstance(at, cst.AugAssign):
        return isinstance(at.operator, (cst.ModuloAssign, cst.DivideAssign, cst.FloorDivideAssign))
    given = file.tree.given_to(at) if isinstance(at, cst.Arg) else None
    return given is not None and given.name == "divmod" and given.index == 1


def _is_asked_before(file: SourceFile, use: cst.CSTNode) -> bool:
    """Whether the program has tested a number before, and so handles 0 itself."""
    tree, text = file.tree, file.tree.source(use)

    def asks(test: cst.CSTNode) -> bool:
        kinds = (cst.Name, cst.Attribute, cst.Call)
        return any(isinstance(one, kinds) and tree.source(one) == text for one in walk(test))

    for below, around in tree.upwards(use):
        if isinstance(around, (cst.If, cst.IfExp)) and below is not around.test and asks(around.test):
            return True
        if isinstance(around, (cst.FunctionDef, cst.ClassDef)):
            break
    return any(
        isinstance(statement, cst.If)
        and leaves(statement.body)
        and not refuses(statement.body)
        and asks(statement.test)
        for statement in tree.earlier_statements(use)
    )


def ends_without(file: SourceFile, asked: cst.CSTNode) -> bool:
    """Whether a test ends the program if there is no device.

    ``assert is_available()``, ``if device_count() == 0: raise …``.

    Args:
        file: the file.
        asked: the call that tells whether there is a device, or how many there are.
    """
    positive = True
    for below, around in file.tree.upwards(asked):
        if isinstance(around, cst.UnaryOperation) and isinstance(around.operator, cst.Not):
            positive = not positive
        elif isinstance(around, cst.ComparisonTarget):
            pass
        elif isinstance(around, cst.Comparison):
            expected = expects_devices(around, asked)
            if expected is None:
                return False
            positive = expected
        elif isinstance(around, cst.Assert):
            return below is around.test and positive
        elif isinstance(around, cst.If):
            other = around.orelse.body if isinstance(around.orelse, cst.Else) else None
            without = other if positive else around.body
            return below is around.test and without is not None and _ends_program(without)
        elif not isinstance(around, cst.BooleanOperation):
            return False
        elif isinstance(around.operator, cst.Or) == positive:
            return False  # the other operand of `or` may let the program go on
    return False


def expects_devices(comparison: cst.Comparison, count: cst.CSTNode) -> bool | None:
    """Whether a comparison is true if there is a device; ``None`` if one device makes no difference."""
    if len(comparison.comparisons) != 1:
        return None
    right = comparison.comparisons[0]
    first = comparison.left is count
    other = right.comparator if first else comparison.left
    if isinstance(other, cst.Integer) and other.value not in ("0", "1"):
        return None
    more, fewer = (cst.GreaterThan, cst.GreaterThanEqual), (cst.LessThan, cst.LessThanEqual)
    if isinstance(right.operator, (*more, *fewer, cst.Equal, cst.NotEqual)):
        return isinstance(right.operator, (cst.NotEqual, *(more if first else fewer)))
    return None


def _ends_program(block: cst.BaseSuite) -> bool:
    """Whether a block's last statement raises or ends the program; a skipped test does not end it."""
    last = block.body[-1] if block.body else None
    if last is None or not refuses(last):
        return False
    for check in (descendant for descendant in walk(last) if isinstance(descendant, cst.Assert)):
        if dotted(check.test) != "False" and not isinstance(check.test, cst.Integer):
            return False  # it checks something else
    words = {descendant.value.lower() for descendant in walk(last) if isinstance(descendant, cst.Name)}
    return not isinstance(last, cst.BaseCompoundStatement) and not any("skip" in word for word in words)
